/* What can be done to runs: from the table's rows, from its selection, from the page of a run. */

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import { api, type ApiError } from "../api";
import { formatBytes, formatPlural } from "../format";
import { navigate, path, runUrl } from "../router";
import { asApiError, dropRun, flush, putRun } from "../store";
import { type Freed, isTerminal, type Run } from "../types";
import { Button, Field } from "../ui/controls";
import { FaultList } from "../ui/notice";
import { Dialog, type MenuItem, toast } from "../ui/overlay";
import { EditDialog } from "./edit_dialog";

type Ask = { what: "cancel" | "remove" | "resume" | "again"; runs: readonly Run[] } | { what: "edit"; run: Run };

const asked = signal<Ask | null>(null);
const close = (): void => { asked.value = null; };

export const askCancel = (runs: readonly Run[]): void => { asked.value = { what: "cancel", runs }; };
export const askRemove = (runs: readonly Run[]): void => { asked.value = { what: "remove", runs }; };
export const askEdit = (run: Run): void => { asked.value = { what: "edit", run }; };

/** What a menu offers for a run, in its state. */
export function listActions(run: Run): MenuItem[] {
  const hasEnded = isTerminal(run);
  return [
    { label: "Name, notes and tags…", icon: "edit", onSelect: () => askEdit(run) },
    hasEnded
      ? { label: "Resume…", icon: "play", onSelect: () => { asked.value = { what: "resume", runs: [run] }; } }
      : { label: "Cancel…", icon: "stop", isDanger: true, isDisabled: run.is_cancel_wanted, onSelect: () => askCancel([run]) },
    { label: "Run again…", icon: "repeat", onSelect: () => { asked.value = { what: "again", runs: [run] }; } },
    { label: "Run again with changes", icon: "fork", onSelect: () => navigate(`/submit?from=${encodeURIComponent(run.run_id)}`) },
    ...(hasEnded ? [{ label: "Remove…", icon: "trash", isDanger: true, onSelect: () => askRemove([run]) } as const] : []),
  ];
}

/** The dialog that is open, if any. Once in the page. */
export function ActionDialogs() {
  const ask = asked.value;
  switch (ask?.what) {
    case undefined: return null;
    case "edit": return <EditDialog run={ask.run} onClose={close} />;
    case "cancel": return <CancelDialog runs={ask.runs} />;
    case "remove": return <RemoveDialog runs={ask.runs} />;
    case "resume": return <StartDialog runs={ask.runs} isResume />;
    case "again": return <StartDialog runs={ask.runs} isResume={false} />;
  }
}

const name = (runs: readonly Run[]): string =>
  runs.length === 1 ? (runs[0]?.run_id ?? "") : formatPlural(runs.length, "run");

interface ConfirmProps {
  title: string;
  button: string;
  isDanger?: boolean;
  isDisabled?: boolean;
  act: () => Promise<void>;
  children: ComponentChildren;
}

/** Asks, acts, and shows in place why it was refused. */
function Confirm({ title, button, isDanger = false, isDisabled = false, act, children }: ConfirmProps) {
  const [error, setError] = useState<ApiError | null>(null);
  const [isBusy, setBusy] = useState(false);
  const go = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      await act();
      close();
    } catch (reason) {
      setError(asApiError(reason));
    } finally {
      setBusy(false);
    }
  };
  return (
    <Dialog title={title} onClose={close}
      footer={
        <>
          <Button onClick={close}>Back</Button>
          <Button kind={isDanger ? "danger primary" : "primary"} disabled={isBusy || isDisabled} onClick={() => void go()}>{button}</Button>
        </>
      }>
      {children}
      {error !== null && (
        <div role="alert" class="field">
          <p class="fault">{error.message}</p>
          {error.faults.length > 0 && <FaultList faults={error.faults} />}
        </div>
      )}
    </Dialog>
  );
}

function CancelDialog({ runs }: { runs: readonly Run[] }) {
  const [reason, setReason] = useState("");
  const live = runs.filter((run) => !isTerminal(run));
  const act = async (): Promise<void> => {
    for (const run of live) await api.cancel(run.run_id, reason);
    toast(`Cancel requested: ${name(live)}`);
  };
  return (
    <Confirm title={`Cancel ${name(live)}?`} button="Cancel run" isDanger act={act} isDisabled={live.length === 0}>
      <p>A running worker saves a checkpoint and stops. The run can be resumed later.</p>
      <Field label="Reason" hint="Optional. It is kept with the run.">
        {(attributes) => <input class="input" {...attributes} value={reason} onInput={(event) => setReason(event.currentTarget.value)} />}
      </Field>
    </Confirm>
  );
}

function RemoveDialog({ runs }: { runs: readonly Run[] }) {
  const ended = runs.filter(isTerminal);
  const [freed, setFreed] = useState<readonly Freed[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  useEffect(() => {
    Promise.all(ended.map((run) => api.remove(run.run_id, true))).then(
      (answers) => setFreed(answers.flatMap((answer) => answer.freed)),
      (reason: unknown) => setError(asApiError(reason)),
    );
  }, []);
  const act = async (): Promise<void> => {
    for (const run of ended) {
      await api.remove(run.run_id, false);
      dropRun(run.run_id);
      if (path.value === runUrl(run.run_id)) navigate("/", { replace: true });
    }
    flush();
    toast(`Removed ${name(ended)}`, "good");
  };
  const size = (freed ?? []).reduce((sum, one) => sum + one.size_bytes, 0);
  return (
    <Confirm title={`Remove ${name(ended)}?`} button="Remove" isDanger act={act} isDisabled={freed === null || ended.length === 0}>
      {error !== null ? <p class="fault" role="alert">{error.message}</p>
        : freed === null ? <p class="muted">Reading what it frees…</p>
        : <p>This deletes checkpoints, logs and metrics, and frees <strong>{formatBytes(size)}</strong>. It cannot be undone.</p>}
      {runs.length > ended.length && <p class="muted">{formatPlural(runs.length - ended.length, "run")} not ended: not removed.</p>}
      {freed !== null && freed.length > 1 && (
        <table class="table">
          <tbody>
            {freed.slice(0, 50).map((one) => (
              <tr key={`${one.kind} ${one.name}`}><td>{one.kind}</td><td class="mono">{one.name}</td><td class="number">{formatBytes(one.size_bytes)}</td></tr>
            ))}
          </tbody>
        </table>
      )}
    </Confirm>
  );
}

function StartDialog({ runs, isResume }: { runs: readonly Run[]; isResume: boolean }) {
  const act = async (): Promise<void> => {
    for (const run of runs) {
      const result = await (isResume ? api.resume(run.run_id) : api.again(run.run_id));
      putRun(result.run);
      flush();
      toast([`Submitted ${result.run.run_id}`, ...result.notes].join(": "), "good");
      if (runs.length === 1) navigate(runUrl(result.run.run_id));
    }
  };
  return (
    <Confirm title={`${isResume ? "Resume" : "Run"} ${name(runs)}${isResume ? "" : " again"}?`} button={isResume ? "Resume" : "Run again"} act={act}>
      <p>
        {isResume
          ? "A new run starts at the newest checkpoint that verifies. This run stays as it is and is recorded as its parent."
          : "The same job is submitted as a new run, from step 0."}
      </p>
    </Confirm>
  );
}
