/* What can be done to runs: from the table's rows, from its selection, from the page of a run. */

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

import { api, type ApiError } from "../api";
import { formatBytes, formatCount, formatPlural } from "../format";
import { navigate, path, runUrl } from "../router";
import { asApiError, dropRun, flush, putRun, runs as allRuns } from "../store";
import { type Freed, isTerminal, type Run, type SubmitResult } from "../types";
import { withCode } from "../ui/code";
import { Button, Field } from "../ui/controls";
import { FaultList } from "../ui/notice";
import { Dialog, type MenuItem, toast } from "../ui/overlay";
import { withDescendants } from "./descent";
import { EditDialog } from "./edit_dialog";

type Ask = { what: "cancel" | "remove" | "resume" | "again"; runs: readonly Run[] } | { what: "edit"; run: Run };

const asked = signal<Ask | null>(null);
const close = (): void => { asked.value = null; };

export const askCancel = (runs: readonly Run[]): void => { asked.value = { what: "cancel", runs }; };
export const askRemove = (runs: readonly Run[]): void => { asked.value = { what: "remove", runs }; };
export const askEdit = (run: Run): void => { asked.value = { what: "edit", run }; };

/** What a menu offers for a run, in its state. */
export function listActions(run: Run): MenuItem[] {
  const cancel: MenuItem = { label: "Cancel…", icon: "stop", isDanger: true, isDisabled: run.is_cancel_wanted, onSelect: () => askCancel([run]) };
  const resume: MenuItem = { label: "Resume…", icon: "play", onSelect: () => { asked.value = { what: "resume", runs: [run] }; } };
  const remove: MenuItem = { label: "Remove…", icon: "trash", isDanger: true, onSelect: () => askRemove([run]) };
  const hasEnded = isTerminal(run);
  return [
    { label: "Name, notes and tags…", icon: "edit", onSelect: () => askEdit(run) },
    ...(!hasEnded ? [cancel] : run.kind === "training" ? [resume] : []), // servers and predictions have no checkpoints
    { label: "Run again…", icon: "repeat", onSelect: () => { asked.value = { what: "again", runs: [run] }; } },
    { label: "Run again with changes", icon: "fork", onSelect: () => navigate(`/submit?from=${encodeURIComponent(run.run_id)}`) },
    ...(hasEnded ? [remove] : []),
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

const MAX_LISTED = 10;

const list = (runs: readonly Run[]): string =>
  runs.slice(0, MAX_LISTED).map((run) => run.run_id).join(", ") + (runs.length > MAX_LISTED ? ` and ${formatCount(runs.length - MAX_LISTED)} more` : "");

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
    <Dialog title={title} onClose={close} onEnter={() => { if (!isBusy && !isDisabled) void go(); }}
      footer={
        <>
          <span class="muted grow" role="status">{isBusy && "Waiting for the daemon…"}</span>
          <Button onClick={close}>Back</Button>
          <Button kind={isDanger ? "danger primary" : "primary"} disabled={isBusy || isDisabled} onClick={() => void go()}>{button}</Button>
        </>
      }>
      {children}
      {error !== null && (
        <div role="alert" class="field">
          <p class="fault">{withCode(error.message)}</p>
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
  const picked = runs.filter(isTerminal);
  const [ended] = useState(() => withDescendants(picked, allRuns.peek().values())); // as they are listed here
  const more = ended.slice(picked.length);
  const live = more.filter((run) => !isTerminal(run));
  const [freed, setFreed] = useState<readonly Freed[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const ids = ended.map((run) => run.run_id);
  useEffect(() => {
    if (ids.length > 0 && live.length === 0) api.remove(ids, true).then((answer) => setFreed(answer.freed), (reason: unknown) => setError(asApiError(reason)));
  }, []);
  const act = async (): Promise<void> => {
    await api.remove(ids, false);
    for (const id of ids) dropRun(id);
    if (ids.some((id) => path.value === runUrl(id))) navigate("/", { replace: true });
    flush();
    toast(`Removed ${name(ended)}`, "good");
  };
  const size = (freed ?? []).reduce((sum, one) => sum + one.size_bytes, 0);
  return (
    <Confirm title={`Remove ${name(ended)}?`} button="Remove" isDanger act={act} isDisabled={freed === null || ended.length === 0}>
      {error !== null ? <p class="fault" role="alert">{withCode(error.message)}</p>
        : ids.length === 0 ? <p>Runs that have not ended cannot be removed: cancel them first.</p>
        : live.length > 0 ? <p class="fault" role="alert">{list(live)} {live.length === 1 ? "continues" : "continue"} {name(picked)} and {live.length === 1 ? "has" : "have"} not ended: cancel first.</p>
        : freed === null ? <p class="muted">Reading what it frees…</p>
        : <p>This deletes checkpoints, files, logs and metrics, and frees <strong>{formatBytes(size)}</strong>. It cannot be undone.</p>}
      {freed !== null && more.length > 0 && <p>{list(more)} {more.length === 1 ? "continues" : "continue"} {name(picked)}, and {more.length === 1 ? "is" : "are"} removed, too.</p>}
      {picked.length > 0 && runs.length > picked.length && <p class="muted">{formatPlural(runs.length - picked.length, "run")} not ended: not removed.</p>}
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

/** How long a run trains: the field of its job that says so, and its value. */
interface Goal {
  field: "max_steps" | "epochs";
  value: number;
}

function readGoal(config: Record<string, unknown> | null): Goal | null {
  for (const field of ["max_steps", "epochs"] as const) {
    const value = config?.[field];
    if (typeof value === "number") return { field, value };
  }
  return null;
}

function StartDialog({ runs, isResume }: { runs: readonly Run[]; isResume: boolean }) {
  return isResume && runs[0] !== undefined ? <ResumeDialog run={runs[0]} /> : <AgainDialog runs={runs} />;
}

/** Shows what a submit made. */
function showSubmitted({ run, notes }: SubmitResult): void {
  putRun(run);
  flush();
  toast([`Submitted ${run.run_id}`, ...notes].join(": "), "good");
}

/** A run that has trained all of its steps can only go on with more of them. */
function ResumeDialog({ run }: { run: Run }) {
  const [goal, setGoal] = useState<Goal | null>(null);
  const [text, setText] = useState("");
  useEffect(() => {
    api.getRun(run.run_id).then(({ run: { config } }) => {
      const found = readGoal(config);
      setGoal(found);
      setText(found === null ? "" : String(found.value));
    }, () => undefined); // the field is missing; the resume says what is wrong
  }, []);
  const isAtEnd = run.state === "COMPLETED" && run.end_step !== null && run.step >= run.end_step;
  const isTooSmall = goal !== null && (!/^[1-9]\d*$/.test(text.trim()) || (isAtEnd && Number(text) <= goal.value));
  const act = async (): Promise<void> => {
    const isChanged = goal !== null && Number(text) !== goal.value;
    const made = await api.resume(run.run_id, isChanged ? { overrides: { [goal.field]: Number(text) } } : {});
    showSubmitted(made);
    navigate(runUrl(made.run.run_id));
  };
  return (
    <Confirm title={`Resume ${run.run_id}?`} button="Resume" act={act} isDisabled={isTooSmall}>
      <p>A new run starts at the newest checkpoint that verifies. This run stays as it is and is recorded as its parent.</p>
      {goal !== null && (
        <Field label={goal.field} hint={isAtEnd ? `It has trained all of its ${goal.field === "epochs" ? "epochs" : "steps"}: more than ${formatCount(goal.value)} are needed.` : "How long it trains in all."}>
          {(attributes) => (
            <input class="input" {...attributes} inputMode="numeric" value={text} autocomplete="off" onInput={(event) => setText(event.currentTarget.value)} />
          )}
        </Field>
      )}
    </Confirm>
  );
}

const AGAIN: Record<string, string> = {
  server: "The same model is served as a new run.",
  prediction: "The same rows are predicted as a new run. Files that are whole in the output folder are kept.",
};

function AgainDialog({ runs }: { runs: readonly Run[] }) {
  const act = async (): Promise<void> => {
    for (const run of runs) {
      const made = await api.again(run.run_id);
      showSubmitted(made);
      if (runs.length === 1) navigate(runUrl(made.run.run_id));
    }
  };
  return (
    <Confirm title={`Run ${name(runs)} again?`} button="Run again" act={act}>
      <p>{AGAIN[runs[0]?.kind ?? ""] ?? "The same job is submitted as a new run, from step 0."}</p>
    </Confirm>
  );
}
