/* The columns of the table of runs. */

import type { ComponentChildren } from "preact";

import { formatAgo, formatCount, formatDuration, formatExactTime, formatNumber } from "../format";
import { matchRoute, navigate, path, query, runUrl, setQuery } from "../router";
import { now } from "../store";
import { isTerminal, type Run } from "../types";
import { Bar } from "../ui/controls";
import { Icon } from "../ui/icon";
import { StateBadge, stateClass } from "../ui/state";
import { estimateLeft, topMetrics } from "./selection";
import { Sparkline } from "./sparkline";
import { speedOf } from "./trends";

export interface Column {
  key: string;
  label: string;
  /** Of the whole column, in px; the last text column takes what is left. */
  width: number;
  isNumber?: boolean;
  /** Not sortable where false. */
  canSort?: boolean;
  cell: (run: Run) => ComponentChildren;
}

function Time({ ms }: { ms: number | null }) {
  if (ms === null || ms === 0) return null;
  return <time title={formatExactTime(ms)} dateTime={new Date(ms).toISOString()}>{formatAgo(ms, now.value)}</time>;
}

export function Progress({ run }: { run: Run }) {
  const text = run.end_step === null ? formatCount(run.step) : `${formatCount(run.step)} / ${formatCount(run.end_step)}`;
  if (run.attempt === 0 && run.step === 0) return <span class="muted">not started</span>;
  if (run.kind === "server") return <span class="ellipsis" title={run.url}>{run.serves || "starting"}</span>;
  return (
    <div class="progress">
      <span class="steps">{text}</span>
      <Bar value={run.step} max={run.end_step} label={`Steps of ${run.run_id}`} kind={stateClass(run.state)} />
    </div>
  );
}

export function TimeLeft({ run, suffix = "" }: { run: Run; suffix?: string }) {
  const left = estimateLeft(run, speedOf(run.run_id));
  return left === null ? null : <span title="From the speed of the last steps">{formatDuration(left)}{suffix}</span>;
}

export function Duration({ run }: { run: Run }) {
  if (run.attempt === 0) return null;
  return <span title="Since it was submitted">{formatDuration((run.ended_ms ?? now.value) - run.submitted_ms)}</span>;
}

function NewestMetrics({ run, count }: { run: Run; count: number }) {
  return (
    <>
      {topMetrics(run, count).map((name) => (
        <span class="metric" key={name} title={`${name} ${formatNumber(run.metrics[name], 8)}`}>
          <span class="muted">{name}</span> {formatNumber(run.metrics[name])}
        </span>
      ))}
    </>
  );
}

const isFine = (run: Run): boolean =>
  run.state === "COMPLETED" || (run.state === "RUNNING" && !run.is_cancel_wanted && run.cause.id === "running");

/** What one wants to know first: the numbers of a run that is fine, the reason of one that waits or failed. */
export function Details({ run, count }: { run: Run; count: number }) {
  return isFine(run) ? <NewestMetrics run={run} count={count} /> : <Why run={run} />;
}

/** Why a run waits, failed or was stopped. Nothing for one that just runs. */
export function Why({ run }: { run: Run }) {
  if (run.state === "RUNNING" && isFine(run)) return null;
  if (run.state === "COMPLETED") return run.stop_reason === "" ? null : <span class="muted">{run.stop_reason}</span>;
  return <span class={run.state === "FAILED" ? "why-bad" : "muted"} title={run.reason}>{run.reason}</span>;
}

/** In the table; from another view it opens the table. */
function filterByTag(tag: string): void {
  if (matchRoute(path.value).view === "runs") setQuery({ tag: [...new Set([...query.value.getAll("tag"), tag])] });
  else navigate(`/?${new URLSearchParams({ tag }).toString()}`);
}

export function TagList({ run }: { run: Run }) {
  return (
    <>
      {Object.entries(run.tags).sort(([one], [other]) => (one < other ? -1 : 1)).map(([key, value]) => (
        <button type="button" class="tag as-button" key={key} title={`Show only runs with ${key}: ${value}`}
          onClick={() => filterByTag(`${key}:${value}`)}>
          {value === "" ? key : `${key}: ${value}`}
        </button>
      ))}
    </>
  );
}

const EXACTNESS: Record<string, { word: string; kind: string }> = {
  certified: { word: "certified", kind: "is-completed" },
  exact: { word: "exact", kind: "is-completed" },
  drifted: { word: "drifted", kind: "is-failed" },
};

export function ExactnessBadge({ run }: { run: Run }) {
  const known = EXACTNESS[run.exactness.state];
  if (known === undefined) return null;
  const step = run.exactness.state === "drifted" && run.exactness.step !== null ? ` at step ${formatCount(run.exactness.step)}` : "";
  return (
    <span class={`state ${known.kind}`} title={run.exactness.text}>
      <Icon name={known.kind === "is-failed" ? "warning" : "completed"} size={13} />{known.word}{step}
    </span>
  );
}

/** Only the icon: the word is its name. */
function ExactnessMark({ run }: { run: Run }) {
  if (EXACTNESS[run.exactness.state] === undefined) return null;
  const isBad = run.exactness.state === "drifted";
  return (
    <span class={`mark ${isBad ? "is-failed" : "is-completed"}`} role="img" aria-label={run.exactness.state} title={run.exactness.text}>
      <Icon name={isBad ? "warning" : "exact"} size={14} />
    </span>
  );
}

export function RunName({ run }: { run: Run }) {
  return (
    <span class="run-name">
      <a href={runUrl(run.run_id)} title={run.run_id}>{run.run_id}</a>
      {run.name !== "" && run.name !== run.run_id && run.name !== run.family && <span class="muted"> {run.name}</span>}
      <ExactnessMark run={run} />
      {run.kind !== "training" && <span class="tag">{run.kind}</span>}
      {run.attempt > 1 && <span class="tag" title={`Attempt ${run.attempt}`}><Icon name="repeat" size={11} />{run.attempt}</span>}
    </span>
  );
}

export const COLUMNS: readonly Column[] = [
  { key: "state", label: "State", width: 132, cell: (run) => <StateBadge run={run} /> },
  { key: "run", label: "Run", width: 208, cell: (run) => <RunName run={run} /> },
  { key: "progress", label: "Step", width: 140, cell: (run) => <Progress run={run} /> },
  { key: "left", label: "Time left", width: 106, isNumber: true, canSort: false, cell: (run) => <TimeLeft run={run} /> },
  { key: "trend", label: "Trend", width: 114, canSort: false, cell: (run) => <Sparkline run={run} /> },
  { key: "details", label: "Newest metrics, or why", width: 286, canSort: false, cell: (run) => <Details run={run} count={2} /> },
  { key: "metrics", label: "Newest metrics", width: 300, canSort: false, cell: (run) => <NewestMetrics run={run} count={3} /> },
  { key: "devices", label: "Devices", width: 78, cell: (run) => run.devices.join(", ") || (isTerminal(run) || run.attempt === 0 ? "" : "CPU") },
  { key: "submitted", label: "Submitted", width: 116, isNumber: true, cell: (run) => <Time ms={run.submitted_ms} /> },
  { key: "duration", label: "Duration", width: 108, isNumber: true, cell: (run) => <Duration run={run} /> },
  { key: "updated", label: "Updated", width: 106, isNumber: true, cell: (run) => <Time ms={run.updated_ms} /> },
  { key: "ended", label: "Ended", width: 96, isNumber: true, cell: (run) => <Time ms={run.ended_ms} /> },
  { key: "attempt", label: "Attempt", width: 80, isNumber: true, cell: (run) => (run.attempt === 0 ? "" : run.attempt) },
  { key: "exactness", label: "Exactness", width: 196, cell: (run) => <ExactnessBadge run={run} /> },
  { key: "trainer", label: "Trainer", width: 180, cell: (run) => <span title={run.trainer}>{run.trainer}</span> },
  { key: "kind", label: "Kind", width: 100, cell: (run) => run.kind },
  { key: "serves", label: "Serves", width: 160, cell: (run) => <span title={run.url}>{run.serves}</span> },
  { key: "parent", label: "Parent", width: 160, cell: (run) => (run.parent_run_id === "" ? "" : <a href={runUrl(run.parent_run_id)}>{run.parent_run_id}</a>) },
  { key: "priority", label: "Priority", width: 80, isNumber: true, cell: (run) => run.priority },
  { key: "tags", label: "Tags", width: 130, cell: (run) => <TagList run={run} /> },
  { key: "notes", label: "Notes", width: 200, cell: (run) => <span title={run.notes}>{run.notes}</span> },
  { key: "why", label: "Why", width: 260, cell: (run) => <Why run={run} /> },
];

export const DEFAULT_COLUMNS: readonly string[] = [
  "state", "run", "progress", "left", "trend", "details", "devices", "submitted", "tags",
];

const metricColumn = (name: string): Column => ({
  key: `m:${name}`, label: name, width: Math.max(90, 44 + name.length * 7.4), isNumber: true,
  cell: (run) => <span title={formatNumber(run.metrics[name], 8)}>{formatNumber(run.metrics[name])}</span>,
});

const tagColumn = (name: string): Column => ({
  key: `tag:${name}`, label: name, width: 120, cell: (run) => run.tags[name] ?? "",
});

/** Columns by their keys, in the order that was asked for. Unknown keys are left out. */
export function findColumns(keys: readonly string[]): Column[] {
  return keys.flatMap((key) => {
    if (key.startsWith("m:")) return [metricColumn(key.slice(2))];
    if (key.startsWith("tag:")) return [tagColumn(key.slice(4))];
    return COLUMNS.filter((column) => column.key === key);
  });
}
