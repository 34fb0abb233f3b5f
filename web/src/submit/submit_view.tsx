/* A new run: a form made from the job's schema, checked by the daemon while one types. */

import "./submit.css";

import { batch, signal } from "@preact/signals";
import { useEffect, useMemo, useState } from "preact/hooks";

import { api, ApiError, send } from "../api";
import { formatCount } from "../format";
import { navigate, query, runUrl } from "../router";
import { asApiError, flush, isDaemonDown, putRun, runs } from "../store";
import { type Fault, type JobCheck, originOf, type SubmitResult } from "../types";
import { withCode } from "../ui/code";
import { Button, Field } from "../ui/controls";
import { Icon } from "../ui/icon";
import { ErrorNotice, FaultList, Loading } from "../ui/notice";
import { toast } from "../ui/overlay";
import { diffDocuments, setAt, sortFaults } from "./document";
import { FormFieldView, showField } from "./form_field";
import { type Document, type FormField, type Json, listPaths, readForm, type Schema, splitForm } from "./schema";

/* What is typed stays while one looks at other views. */
const job = signal<Document>({});
const baseDir = signal<string | null>(null); // null: nothing was typed
const filled = signal(0); // counts fills from outside: the fields then show the new values
const isNewForced = signal(false); // also where an equal run would answer
const parent = signal<{ runId: string; config: Document; origin: ReturnType<typeof originOf> } | null>(null); // the run that this one is made from

const CHECK_MS = 250; // after the last key

function fill(document: Document): void {
  batch(() => {
    job.value = document;
    filled.value += 1;
  });
}

/** What a submit and a check send. */
function makeBody(): Record<string, unknown> {
  if (parent.value !== null) return { config: job.value, ...parent.value.origin, force_new: true };
  const where = folder();
  return { config: job.value, ...(where === "" ? {} : { base_dir: where }), ...(isNewForced.value ? { force_new: true } : {}) };
}

function newestFolder(): string {
  let newest = { submitted_ms: -1, base_dir: "" };
  for (const run of runs.value.values()) if (run.submitted_ms > newest.submitted_ms && run.base_dir !== "") newest = run;
  return newest.base_dir;
}

const folder = (): string => baseDir.value ?? newestFolder();

/** Read by the server, with the rules of `trn run`. JSON is YAML, too. */
async function readJobText(text: string, fileName: string): Promise<Document> {
  const format = fileName.endsWith(".toml") ? "toml" : "yaml";
  return (await send<{ config: Document }>("POST", ["parse-job"], { text, format })).config;
}

interface Checked {
  faults: readonly Fault[];
  check: JobCheck | null;
  error: ApiError | null; // it could not be checked
  isBusy: boolean;
}

const UNCHECKED: Checked = { faults: [], check: null, error: null, isBusy: false };

/** What the daemon would say to the job as it stands, a moment after the last key. */
function useCheck(): Checked {
  const [checked, setChecked] = useState<Checked>(UNCHECKED);
  const body = makeBody();
  useEffect(() => {
    if (Object.keys(job.value).length === 0) {
      setChecked(UNCHECKED);
      return;
    }
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      setChecked((old) => ({ ...old, isBusy: true }));
      try {
        const check = await api.checkJob(body, abort.signal);
        setChecked({ faults: check.faults, check, error: null, isBusy: false });
      } catch (reason) {
        if (abort.signal.aborted) return;
        const error = asApiError(reason);
        const isRefusal = [400, 409, 422].includes(error.status);
        setChecked({ faults: isRefusal ? (error.faults.length > 0 ? error.faults : [{ path: "", kind: "", text: error.message, found: "", expected: "", hint: "" }]) : [], check: null, error: isRefusal ? null : error, isBusy: false });
      }
    }, CHECK_MS);
    return () => { clearTimeout(timer); abort.abort(); };
  }, [job.value, parent.value, body["base_dir"], isNewForced.value, isDaemonDown.value]); // it is asked again when it is back
  return checked;
}

function useForm(): { form: FormField[] | null; error: ApiError | null } {
  const [form, setForm] = useState<FormField[] | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  useEffect(() => {
    api.getJobSchema().then((schema) => setForm(readForm(schema as Schema)), (reason: unknown) => setError(asApiError(reason)));
  }, []);
  return { form, error };
}

/** Fills the form from the run that the link names. */
function useParent(): ApiError | null {
  const from = query.value.get("from");
  const [error, setError] = useState<ApiError | null>(null);
  useEffect(() => {
    setError(null);
    if (from === null) {
      if (parent.peek() !== null) fill({}); // what was another run's job is not the next one's
      parent.value = null;
      return;
    }
    if (parent.peek()?.runId === from) return;
    api.getRun(from).then(({ run }) => {
      const { run_id: _, ...config } = (run.config ?? {}) as Document;
      parent.value = { runId: from, config, origin: originOf(run) };
      baseDir.value = run.base_dir === "" ? null : run.base_dir;
      fill(config);
    }, (reason: unknown) => setError(asApiError(reason)));
  }, [from]);
  return error;
}

async function submitJob(): Promise<void> {
  const from = parent.value;
  const checkpoint = query.value.get("checkpoint");
  let result: SubmitResult;
  if (from !== null) {
    const overrides = diffDocuments(from.config, job.value);
    result = await (checkpoint === null ? api.again(from.runId, { overrides }) : api.resume(from.runId, { overrides, checkpoint }));
  } else {
    const where = folder();
    // As `trn run` does: the code is frozen, so that what waits in the queue trains what was submitted.
    result = await api.submit({ ...makeBody(), ...(where === "" ? {} : { code_dir: where }) });
  }
  putRun(result.run);
  flush();
  toast(result.existed ? `Not trained again: ${result.run.run_id} is equal` : `Submitted ${result.run.run_id}`, result.existed ? "info" : "good");
  parent.value = null;
  navigate(runUrl(result.run.run_id));
}

export function SubmitView() {
  const { form, error } = useForm();
  const [isRestOpen, setRestOpen] = useState(false);
  const parentError = useParent();
  const checked = useCheck();
  const paths = useMemo(() => listPaths(form ?? []), [form]);
  const faults = useMemo(() => sortFaults(checked.faults, paths), [checked.faults, paths]);
  if (error !== null) return <ErrorNotice error={error} />;
  if (form === null) return <Loading what="the form" />;
  const { first, rest } = splitForm(form, job.value);
  const change = (path: string, value: Json | undefined): void => { job.value = setAt(job.value, path, value); };
  const view = (field: FormField) => <FormFieldView key={`${filled.value} ${field.path}`} field={field} job={job.value} faults={faults} onChange={change} />;
  const step = query.value.get("step");
  return (
    <div class="submit">
      <div class="view-head">
        <h1>Submit a run</h1>
        {Object.keys(job.value).length > 0 && <Button kind="quiet" icon="close" onClick={() => { baseDir.value = null; fill({}); navigate("/submit"); }}>Clear</Button>}
      </div>
      <div class="submit-columns">
        <div class="stack">
          {parentError !== null && <p class="fault" role="alert">{parentError.message}</p>}
          {parent.value !== null && (
            <p class="card body">
              {step === null && query.value.get("checkpoint") === null ? "The job of " : "A new run from the checkpoint "}
              {step !== null && <>at step <strong>{formatCount(Number(step))}</strong> of </>}
              <a href={runUrl(parent.value.runId)}>{parent.value.runId}</a>. What you change here is changed in the new run.
            </p>
          )}
          {parent.value === null && <JobText />}
          <section class="card body form-grid" aria-label="Job">
            {parent.value === null && (
              <Field label="Folder" hint="On this machine. Code is imported from here; relative paths of the job start here.">
                {(attributes) => (
                  <input class="input" {...attributes} value={folder()} spellcheck={false} autocomplete="off"
                    onInput={(event) => { baseDir.value = event.currentTarget.value; }} />
                )}
              </Field>
            )}
            {first.map(view)}
          </section>
          <details class="card body form-group" open={isRestOpen || rest.some(({ path }) => [...faults.keys()].some((at) => at === path || at.startsWith(`${path}.`)))}
            onToggle={(event) => setRestOpen(event.currentTarget.open)}>
            <summary><strong>All other fields</strong> <span class="muted">cadences, checkpoints, retry, time limits, environment…</span></summary>
            <div class="form-grid">{rest.map(view)}</div>
          </details>
        </div>
        <Verdict checked={checked} faults={faults} numFaults={checked.faults.length} />
      </div>
    </div>
  );
}

/** A job file, dropped, chosen or pasted. */
function JobText() {
  const [text, setText] = useState("");
  const [error, setError] = useState<ApiError | null>(null);
  const [isOver, setOver] = useState(false);
  const read = async (content: string, fileName: string): Promise<void> => {
    setError(null);
    if (content.trim() === "") return;
    try {
      fill(await readJobText(content, fileName));
    } catch (reason) {
      setError(asApiError(reason));
    }
  };
  const take = (content: string, fileName = ""): void => { setText(content); void read(content, fileName); };
  const takeFile = async (file: File | undefined): Promise<void> => { if (file !== undefined) take(await file.text(), file.name); };
  useEffect(() => {
    const over = (event: DragEvent): void => { event.preventDefault(); setOver(true); };
    const leave = (event: DragEvent): void => { if (event.relatedTarget === null) setOver(false); };
    const drop = (event: DragEvent): void => { event.preventDefault(); setOver(false); void takeFile(event.dataTransfer?.files[0]); };
    // Anywhere: a browser opens a file that is dropped beside the field, and what was typed is gone.
    document.addEventListener("dragover", over);
    document.addEventListener("dragleave", leave);
    document.addEventListener("drop", drop);
    return () => {
      document.removeEventListener("dragover", over);
      document.removeEventListener("dragleave", leave);
      document.removeEventListener("drop", drop);
    };
  }, []);
  return (
    <section class={`card body job-file${isOver ? " is-over" : ""}`} aria-label="A job file">
      <Field label="Job file" hint="Drop a YAML, TOML or JSON file here, choose one, or paste its text. It fills the form below."
        faults={error === null ? [] : [error.message, ...error.faults.map((fault) => fault.text)]}>
        {(attributes) => (
          <textarea class="input" {...attributes} rows={text === "" ? 2 : 8} value={text} spellcheck={false} placeholder="trainer: my_project.training:MyTrainer"
            onChange={(event) => take(event.currentTarget.value)}
            onPaste={(event) => { const area = event.currentTarget; setTimeout(() => take(area.value)); }} />
        )}
      </Field>
      <label class="button small choose-file">
        Choose a file…
        <input type="file" class="visually-hidden" accept=".yaml,.yml,.json,.toml" onChange={(event) => void takeFile(event.currentTarget.files?.[0])} />
      </label>
    </section>
  );
}

const MAX_LISTED = 8;

function Verdict({ checked, faults, numFaults }: { checked: Checked; faults: ReadonlyMap<string, readonly string[]>; numFaults: number }) {
  const loose = faults.get("") ?? [];
  const places = [...faults.keys()].filter((path) => path !== "");
  const [error, setError] = useState<ApiError | null>(null);
  const [isBusy, setBusy] = useState(false);
  const isEmpty = Object.keys(job.value).length === 0;
  useEffect(() => setError(null), [job.value, isDaemonDown.value]);
  const go = async (): Promise<void> => {
    setBusy(true);
    setError(null);
    try {
      await submitJob();
    } catch (reason) {
      setError(asApiError(reason));
    } finally {
      setBusy(false);
    }
  };
  return (
    <aside class="card verdict" aria-label="Check">
      <header><h2 class="grow">Check</h2>{checked.isBusy && <span class="muted">checking…</span>}</header>
      <div class="body stack" role="status">
        {isEmpty ? <p class="muted">Fill in the form, or drop a job file. The daemon checks it as you type.</p>
          : checked.error !== null ? <p class="fault">{withCode(checked.error.message)}</p>
          : numFaults > 0 ? <p class="fault"><Icon name="warning" /> {numFaults === 1 ? "1 fault" : `${numFaults} faults`}{places.length > 0 && ". Go to it:"}</p>
          : checked.check !== null ? <p class="good"><Icon name="completed" /> This job would be accepted.</p> : null}
        {places.length > 0 && (
          <ul class="fault-places">
            {places.slice(0, MAX_LISTED).map((path) => <li key={path}><Button isSmall onClick={() => showField(path)}>{path}</Button></li>)}
            {places.length > MAX_LISTED && <li class="muted">and {places.length - MAX_LISTED} more</li>}
          </ul>
        )}
        {loose.length > 0 && <ul class="faults">{loose.map((text) => <li key={text} class="fault">{withCode(text)}</li>)}</ul>}
        {(checked.check?.notes ?? []).map((note) => <p class="muted" key={note}>{note}</p>)}
        {error !== null && error.message !== checked.error?.message && <div role="alert"><p class="fault">{withCode(error.message)}</p><FaultList faults={error.faults} /></div>}
      </div>
      <footer class="body stack">
        {parent.value === null && (
          <label class="check">
            <input type="checkbox" checked={isNewForced.value} onChange={(event) => { isNewForced.value = event.currentTarget.checked; }} />
            Train again if an equal run exists
          </label>
        )}
        <Button kind="primary" disabled={isBusy || isEmpty || numFaults > 0} onClick={() => void go()}>{isBusy ? "Submitting…" : "Submit"}</Button>
      </footer>
    </aside>
  );
}
