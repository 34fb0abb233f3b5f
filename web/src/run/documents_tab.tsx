/* Documents of a run, as they are kept: environment, dataset, certificate, doctor's report, job. */

import { useRef, useState } from "preact/hooks";

import { get } from "../api";
import { formatCount } from "../format";
import { query, setQuery } from "../router";
import { withCode } from "../ui/code";
import { Segmented } from "../ui/controls";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { useAnswer } from "./answer";
import { isTable } from "./fork_target";
import type { RunModel } from "./run_model";

const LABELS: Record<string, string> = {
  environment: "Environment", dataset: "Dataset", certificate: "Certificate", doctor: "Machine report", job: "Job",
};

const MISSING: Record<string, string> = {
  environment: "The worker writes it when it starts.",
  dataset: "It is kept with the first checkpoint.",
  certificate: "`trn check` writes one: it proves that a trainer class resumes exactly.",
};

export function DocumentsTab({ model }: { model: RunModel }) {
  const list = useAnswer((abort) => get<{ documents: string[] }>(["runs", model.runId, "documents"], {}, abort), `${model.runId} ${model.run.value!.attempt} ${model.run.value!.state} ${model.filesVersion.value}`);
  const before = useRef<readonly string[] | null>(null); // it grows while the run goes on
  if (list.value !== null) before.current = list.value.documents;
  const kept = before.current;
  const wanted = query.value.get("document");
  if (list.error !== null && kept === null) return <ErrorNotice error={list.error} retry={list.reload} />;
  if (kept === null) return <Loading what="documents" />;
  const names = [...new Set(["environment", "dataset", "certificate", ...kept])];
  const name = wanted !== null && names.includes(wanted) ? wanted : (names.find((one) => kept.includes(one)) ?? "environment");
  return (
    <section class="stack" aria-label="Documents">
      <Segmented label="Document" value={name} options={names.map((value) => ({ value, label: LABELS[value] ?? value }))}
        onChange={(value) => setQuery({ document: value })} />
      {kept.includes(name)
        ? <Document key={name} runId={model.runId} name={name} />
        : <Empty title={`There is no ${(LABELS[name] ?? name).toLowerCase()} document`}><p>{withCode(MISSING[name] ?? "")}</p></Empty>}
    </section>
  );
}

function Document({ runId, name }: { runId: string; name: string }) {
  const answer = useAnswer((abort) => get<unknown>(["runs", runId, "documents", name], {}, abort), name);
  if (answer.error !== null) return <ErrorNotice error={answer.error} retry={answer.reload} />;
  if (answer.value === null) return <Loading what={name} />;
  return <div class="card body"><Tree value={answer.value} depth={0} /></div>;
}

const MAX_CHILDREN = 200;
const MAX_TITLE = 80; // characters

/** A JSON document as nested lists. Long ones show their beginning. */
export function Tree({ value, depth }: { value: unknown; depth: number }) {
  const [limit, setLimit] = useState(MAX_CHILDREN);
  if (!isTable(value) && !Array.isArray(value)) return <span class={`leaf is-${value === null ? "null" : typeof value}`}>{value === "" ? '""' : String(value)}</span>;
  const entries = Object.entries(value);
  if (entries.length === 0) return <span class="muted">{Array.isArray(value) ? "none" : "empty"}</span>;
  if (Array.isArray(value) && value.every((one) => typeof one !== "object") && value.length <= 12) return <span class="leaf">{value.join(", ")}</span>;
  return (
    <ul class="tree">
      {entries.slice(0, limit).map(([name, child]) => (
        <li key={name}>
          {isBranch(child) ? (
            <details open={depth < 1 && Object.keys(child as object).length <= 20}>
              <summary>{name} <span class="muted">{(Array.isArray(value) && titleOf(child)) || `(${formatCount(Object.keys(child as object).length)})`}</span></summary>
              <Tree value={child} depth={depth + 1} />
            </details>
          ) : <><span class="name">{name}</span> <Tree value={child} depth={depth + 1} /></>}
        </li>
      ))}
      {entries.length > limit && (
        <li><button type="button" class="button small" onClick={() => setLimit(limit * 10)}>Show more of {formatCount(entries.length)}</button></li>
      )}
    </ul>
  );
}

/** What tells one entry of a list from the next: its first text. */
function titleOf(value: unknown): string {
  if (!isTable(value)) return "";
  const text = Object.values(value).find((one) => typeof one === "string" && one !== "");
  return typeof text === "string" ? text.slice(0, MAX_TITLE) : "";
}

function isBranch(value: unknown): boolean {
  if (Array.isArray(value)) return value.length > 12 || value.some((one) => typeof one === "object" && one !== null);
  return isTable(value) && Object.keys(value).length > 0;
}
