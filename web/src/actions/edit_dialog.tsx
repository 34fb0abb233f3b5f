/* Name, notes and tags of a run. */

import { useState } from "preact/hooks";

import { api, type ApiError } from "../api";
import { asApiError, flush, putRun } from "../store";
import type { Run } from "../types";
import { withCode } from "../ui/code";
import { Button, Field } from "../ui/controls";
import { Dialog, toast } from "../ui/overlay";

type Pair = { key: string; value: string };

/** What must be sent so that the old tags become the new ones; null removes. */
export function diffTags(old: Record<string, string>, pairs: readonly Pair[]): Record<string, string | null> {
  const change: Record<string, string | null> = {};
  const kept = new Map(pairs.map(({ key, value }) => [key.trim(), value.trim()] as const).filter(([key]) => key !== ""));
  for (const [key, value] of kept) if (old[key] !== value) change[key] = value;
  for (const key of Object.keys(old)) if (!kept.has(key)) change[key] = null;
  return change;
}

export function EditDialog({ run, onClose }: { run: Run; onClose: () => void }) {
  const [name, setName] = useState(run.name);
  const [notes, setNotes] = useState(run.notes);
  const [pairs, setPairs] = useState<Pair[]>([...Object.entries(run.tags).map(([key, value]) => ({ key, value })), { key: "", value: "" }]);
  const [error, setError] = useState<ApiError | null>(null);

  const edit = (index: number, change: Partial<Pair>): void => {
    const next = pairs.map((pair, at) => (at === index ? { ...pair, ...change } : pair));
    const last = next.at(-1);
    setPairs(last !== undefined && last.key !== "" ? [...next, { key: "", value: "" }] : next);
  };
  const save = async (): Promise<void> => {
    const tags = diffTags(run.tags, pairs);
    const change = { ...(name === run.name ? {} : { name }), ...(notes === run.notes ? {} : { notes }), ...(Object.keys(tags).length === 0 ? {} : { tags }) };
    try {
      if (Object.keys(change).length > 0) {
        putRun(await api.update(run.run_id, change));
        flush();
        toast(`Saved ${run.run_id}`, "good");
      }
      onClose();
    } catch (reason) {
      setError(asApiError(reason));
    }
  };

  return (
    <Dialog title={`Name, notes and tags of ${run.run_id}`} onClose={onClose} onEnter={() => void save()}
      footer={<><Button onClick={onClose}>Back</Button><Button kind="primary" onClick={() => void save()}>Save</Button></>}>
      <Field label="Name" hint="A title for people. The run id stays.">
        {(attributes) => <input class="input" {...attributes} value={name} onInput={(event) => setName(event.currentTarget.value)} />}
      </Field>
      <Field label="Notes">
        {(attributes) => (
          <textarea class="input" rows={4} {...attributes} value={notes} onInput={(event) => setNotes(event.currentTarget.value)} />
        )}
      </Field>
      <div class="field" role="group" aria-label="Tags">
        <span class="label">Tags</span>
        {pairs.map((pair, index) => (
          <div class="pair" key={index}>
            <input class="input" aria-label={`Name of tag ${index + 1}`} placeholder="name" value={pair.key}
              onInput={(event) => edit(index, { key: event.currentTarget.value })} />
            <input class="input" aria-label={`Value of tag ${index + 1}`} placeholder="value" value={pair.value}
              onInput={(event) => edit(index, { value: event.currentTarget.value })} />
            <Button kind="quiet" icon="close" label={`Remove tag ${index + 1}`} disabled={index === pairs.length - 1}
              onClick={() => setPairs(pairs.filter((_, at) => at !== index))} />
          </div>
        ))}
      </div>
      {error !== null && <p class="fault" role="alert">{withCode(error.message)}</p>}
    </Dialog>
  );
}
