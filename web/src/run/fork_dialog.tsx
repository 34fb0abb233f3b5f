/* Fork by click: from a point of a curve to a new run that starts at the checkpoint before it. */

import { useEffect, useMemo, useState } from "preact/hooks";

import { api, type ApiError } from "../api";
import { formatBytes, formatCount } from "../format";
import { navigate, runUrl } from "../router";
import { asApiError, flush, putRun } from "../store";
import { type Artifact, type Fault, originOf, type Run } from "../types";
import { withCode } from "../ui/code";
import { Button, Field, Segmented } from "../ui/controls";
import { ErrorNotice, FaultList, Loading } from "../ui/notice";
import { Dialog, toast } from "../ui/overlay";
import { useAnswer } from "./answer";
import { type Config, findOverrides, findTarget, flatten, type ForkTarget, parseValue, setValue } from "./fork_target";
import type { RunModel } from "./run_model";

const PAGE = 1000;
const CHECK_MS = 400;

async function listCheckpoints(runId: string, abort: AbortSignal): Promise<Artifact[]> {
  const found: Artifact[] = [];
  let token = "";
  do {
    const page = await api.listArtifacts(runId, { kind: "checkpoint", limit: PAGE, page_token: token || null }, abort);
    found.push(...page.artifacts);
    token = page.next_page_token;
  } while (token !== "");
  return found;
}

/** Of the run, and with parents those that the curve goes through. */
async function listTargets(model: RunModel, withParents: boolean, abort: AbortSignal): Promise<Artifact[]> {
  const parts = withParents ? model.ancestors.peek() : [];
  const found = await Promise.all([
    listCheckpoints(model.runId, abort),
    ...parts.map(async ({ run_id: id, to_step: end }) => (await listCheckpoints(id, abort)).filter(({ step }) => step <= (end ?? Infinity))),
  ]);
  return found.flat();
}

/** Below a chart: which checkpoint the picked point leads to. */
export function ForkBar({ model, withParents, step, onFork, onClose }: {
  model: RunModel; withParents: boolean; step: number; onFork: (target: ForkTarget) => void; onClose: () => void;
}) {
  const answer = useAnswer(
    (abort) => listTargets(model, withParents, abort),
    `${model.runId} ${model.filesVersion.value} ${withParents ? model.ancestors.value.length : 0}`,
  );
  const target = answer.value === null ? null : findTarget(answer.value, step);
  return (
    <div class="fork-bar" role="status">
      <span>Step {formatCount(step)}.{" "}
        {answer.error !== null ? answer.error.message
          : answer.value === null ? "Looking for a checkpoint…"
          : target === null ? "This run has no checkpoint to fork from."
          : target.isAfter ? `No checkpoint at or before it. The first one is at step ${formatCount(target.step)}.`
          : `Nearest checkpoint: step ${formatCount(target.step)}${target.artifact.run_id === model.runId ? "" : ` of ${target.artifact.run_id}`}.`}
      </span>
      <span class="grow" />
      {target !== null && <Button isSmall kind="primary" icon="fork" onClick={() => onFork(target)}>Fork from step {formatCount(target.step)}</Button>}
      <Button isSmall kind="quiet" icon="close" label="Close" onClick={onClose} />
    </div>
  );
}

/** Fields that belong to the old run, or that the fork sets itself. */
const NOT_FORKED = new Set(["run_id", "resume_checkpoint_path", "resume_from_latest", "resume_older"]);

interface ForkProps {
  target: ForkTarget;
  onClose: () => void;
}

/** The parent of the new run is the run that saved the checkpoint: of it are the config and the code. */
export function ForkDialog({ model, ...props }: ForkProps & { model: RunModel }) {
  const id = props.target.artifact.run_id;
  const isOwn = id === model.runId;
  const parent = useAnswer(async (abort) => (isOwn ? null : (await api.getRun(id, abort)).run), id);
  if (isOwn) return <ForkForm run={model.run.value!} {...props} />;
  if (parent.value !== null) return <ForkForm run={parent.value} {...props} />;
  return (
    <Dialog title={`Fork ${id} from step ${formatCount(props.target.step)}`} isWide onClose={props.onClose}>
      {parent.error === null ? <Loading what={`run ${id}`} /> : <ErrorNotice error={parent.error} retry={parent.reload} />}
    </Dialog>
  );
}

function ForkForm({ run, target, onClose }: ForkProps & { run: Run }) {
  const old = useMemo(
    () => Object.fromEntries(Object.entries(run.config ?? {}).filter(([name]) => !NOT_FORKED.has(name))),
    [run.run_id],
  );
  const [config, setConfig] = useState<Config>(old);
  const [text, setText] = useState<string | null>(null); // of the JSON editor while it is open
  const [textFault, setTextFault] = useState("");
  const [faults, setFaults] = useState<readonly Fault[]>([]);
  const [error, setError] = useState<ApiError | null>(null);
  const [isBusy, setBusy] = useState(false);
  const overrides = useMemo(() => findOverrides(old, config), [config]);
  const numChanged = flatten(overrides).length;

  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(() => {
      api.checkJob({ config, ...originOf(run), force_new: true }, abort.signal).then(
        (found) => setFaults(found.faults),
        (reason: unknown) => { if (!abort.signal.aborted) setFaults(asApiError(reason).faults); },
      );
    }, CHECK_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [config]);

  const edit = (json: string): void => {
    setText(json);
    try {
      const parsed: unknown = JSON.parse(json);
      if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) throw new Error("expected an object");
      setTextFault("");
      setConfig(parsed as Config);
    } catch (reason) {
      setTextFault(`This is not a job as JSON: ${reason instanceof Error ? reason.message : String(reason)}`);
    }
  };
  const fork = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      const made = await api.resume(run.run_id, { checkpoint: target.artifact.artifact_id, overrides });
      putRun(made.run);
      flush();
      toast([`Submitted ${made.run.run_id}`, ...made.notes].join(": "), "good");
      onClose();
      navigate(runUrl(made.run.run_id));
    } catch (reason) {
      setError(asApiError(reason));
      setBusy(false);
    }
  };
  return (
    <Dialog title={`Fork ${run.run_id} from step ${formatCount(target.step)}`} isWide onClose={onClose}
      footer={
        <>
          <span class="muted grow">{isBusy ? "Waiting for the daemon…" : numChanged === 0 ? "Nothing changed yet" : `${numChanged} changed`}</span>
          <Button onClick={onClose}>Back</Button>
          <Button kind="primary" icon="fork" disabled={isBusy || textFault !== ""} onClick={() => void fork()}>Start new run</Button>
        </>
      }>
      <p>
        The new run starts from checkpoint <span class="mono">{target.artifact.name}</span> ({formatBytes(target.artifact.size_bytes)}).
        Run {run.run_id} stays as it is and is recorded as the parent.
      </p>
      <Segmented label="Editor" value={text === null ? "form" : "json"}
        options={[{ value: "form", label: "Form" }, { value: "json", label: "JSON" }]}
        onChange={(kind) => {
          setTextFault("");
          setText(kind === "json" ? JSON.stringify(config, null, 2) : null);
        }} />
      {text === null ? <ConfigForm old={old} config={config} faults={faults} onChange={setConfig} /> : (
        <Field label="Job" faults={textFault === "" ? [] : [textFault]}>
          {(attributes) => <textarea class="input" rows={18} spellcheck={false} {...attributes} value={text} onInput={(event) => edit(event.currentTarget.value)} />}
        </Field>
      )}
      {(text !== null || error !== null) && faults.length > 0 && <FaultList faults={faults} />}
      {error !== null && (
        <div role="alert" class="field">
          <p class="fault">{withCode(error.message)}</p>
          {error.faults.length > 0 && <FaultList faults={error.faults} />}
        </div>
      )}
    </Dialog>
  );
}

const show = (value: unknown): string => (typeof value === "string" ? value : JSON.stringify(value));

/** One field per value, the hyperparameters first; faults stand at their field. */
function ConfigForm({ old, config, faults, onChange }: {
  old: Config; config: Config; faults: readonly Fault[]; onChange: (config: Config) => void;
}) {
  const [search, setSearch] = useState("");
  const before = useMemo(() => new Map(flatten(old)), [old]);
  const rank = (name: string): number => (name.startsWith("hyperparams.") ? 0 : /^(max_steps|epochs|seed|batch_size)/.test(name) ? 1 : 2);
  const rows = useMemo(() => flatten(old).map(([name]) => name).sort((a, b) => rank(a) - rank(b)), [old]);
  const now = new Map(flatten(config));
  const shown = rows.filter((name) => name.toLowerCase().includes(search.toLowerCase()));
  const elsewhere = faults.filter(({ path }) => !rows.includes(path));
  return (
    <>
      <input class="input" type="search" placeholder="Find a field" aria-label="Find a field" value={search}
        onInput={(event) => setSearch(event.currentTarget.value)} />
      {elsewhere.length > 0 && <FaultList faults={elsewhere} />}
      <div class="config-form">
        {shown.map((name) => {
          const value = now.get(name);
          const isChanged = JSON.stringify(value) !== JSON.stringify(before.get(name));
          return (
            <Field key={name} label={name} faults={faults.filter(({ path }) => path === name).map((fault) => fault.text)}
              {...(isChanged ? { hint: `was ${show(before.get(name))}` } : {})}>
              {(attributes) => (
                <ValueInput attributes={attributes} value={value}
                  onText={(text) => onChange(setValue(config, name, parseValue(text, before.get(name))))} />
              )}
            </Field>
          );
        })}
      </div>
    </>
  );
}

/** Keeps the text as it is typed: "1." is not yet the number that it will be. */
function ValueInput({ attributes, value, onText }: { attributes: object; value: unknown; onText: (text: string) => void }) {
  const [text, setText] = useState(show(value));
  return (
    <input class="input mono" {...attributes} value={text} spellcheck={false} autocomplete="off"
      onInput={(event) => {
        setText(event.currentTarget.value);
        onText(event.currentTarget.value);
      }} />
  );
}
