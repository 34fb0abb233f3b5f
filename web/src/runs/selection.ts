/* Which runs the table shows and in which order: pure functions over records, without a view. */

import { machineNow } from "../clock";
import { isTerminal, type Run, toNumber } from "../types";

/** What is asked for, as it stands in the link. */
export interface TableQuery {
  text: string;
  states: readonly string[];
  tags: readonly string[]; // "key:value", or "key" for any value
  sort: string; // a column's key; "-" before it: descending
  by: string; // "", "parent", "state", "trainer" or "tag:KEY"
  shut: readonly string[]; // groups that are collapsed
}

export type Item =
  | { kind: "run"; run: Run }
  | { kind: "group"; key: string; label: string; runs: readonly Run[]; isShut: boolean };

export function readTableQuery(query: URLSearchParams): TableQuery {
  return {
    text: query.get("q") ?? "",
    states: query.getAll("state"),
    tags: query.getAll("tag"),
    sort: query.get("sort") ?? "-submitted",
    by: query.get("by") ?? "",
    shut: query.getAll("shut"),
  };
}

const haystacks = new WeakMap<Run, string>();

function haystack(run: Run): string {
  let text = haystacks.get(run);
  if (text === undefined) {
    const tags = Object.entries(run.tags).map(([key, value]) => `${key}:${value}`);
    text = [run.run_id, run.name, run.state, run.reason, run.trainer, run.notes, ...run.devices, ...tags]
      .join("\n").toLowerCase();
    haystacks.set(run, text);
  }
  return text;
}

/** The newest value of a metric by its whole name, or by its last part where only one metric ends so. */
export function findMetric(run: Run, name: string): number | null {
  if (name === "step") return run.step;
  const exact = run.metrics[name];
  if (exact !== undefined) return toNumber(exact);
  const ends = Object.keys(run.metrics).filter((key) => key.endsWith(`/${name}`));
  const [only] = ends;
  return ends.length === 1 && only !== undefined ? toNumber(run.metrics[only] ?? "nan") : null;
}

type Test = (run: Run) => boolean;

/** A metric compared with a number: loss<0.5. */
export const COMPARISON = /^([^\s<>=]+)(<=|>=|<|>|=)([-+]?[\d.]+(?:e[-+]?\d+)?)$/i;

function compare(left: number, operator: string, right: number): boolean {
  switch (operator) {
    case "<": return left < right;
    case ">": return left > right;
    case "<=": return left <= right;
    case ">=": return left >= right;
    default: return left === right;
  }
}

/** A word of the filter: text, -text, /regular expression/ or a comparison such as loss<0.5. */
function readWord(word: string): Test {
  if (word.length > 1 && word.startsWith("-")) {
    const test = readWord(word.slice(1));
    return (run) => !test(run);
  }
  if (word.length > 2 && word.startsWith("/") && word.endsWith("/")) {
    try {
      const pattern = new RegExp(word.slice(1, -1), "im"); // ^ and $: of its id, its name or another text
      return (run) => pattern.test(haystack(run));
    } catch {
      // not a regular expression yet: text
    }
  }
  const comparison = COMPARISON.exec(word);
  if (comparison !== null) {
    const [, name = "", operator = "", number = ""] = comparison;
    const limit = Number(number);
    return (run) => {
      const value = findMetric(run, name);
      return value !== null && compare(value, operator, limit);
    };
  }
  const text = word.toLowerCase();
  return (run) => haystack(run).includes(text);
}

/** All words must hold. */
export function readFilter(text: string): Test {
  const tests = text.split(/\s+/).filter((word) => word !== "").map(readWord);
  return (run) => tests.every((test) => test(run));
}

function hasTag(run: Run, tag: string): boolean {
  const colon = tag.indexOf(":");
  if (colon < 0) return run.tags[tag] !== undefined;
  return run.tags[tag.slice(0, colon)] === tag.slice(colon + 1);
}

export function filterRuns(runs: Iterable<Run>, query: TableQuery): Run[] {
  const matches = readFilter(query.text);
  const states = new Set(query.states);
  const result: Run[] = [];
  for (const run of runs) {
    if (states.size > 0 && !states.has(run.state)) continue;
    if (!query.tags.every((tag) => hasTag(run, tag))) continue;
    if (matches(run)) result.push(run);
  }
  return result;
}

export type SortKey = number | string | null;

const STATE_ORDER = ["RUNNING", "DISPATCHING", "PENDING", "FAILED", "CANCELLED", "COMPLETED"];

/** What a column is sorted by; null stands last in both directions. */
export function sortKey(run: Run, column: string): SortKey {
  if (column.startsWith("m:")) {
    const value = run.metrics[column.slice(2)];
    const number = value === undefined ? null : toNumber(value);
    return number === null || Number.isNaN(number) ? null : number;
  }
  if (column.startsWith("tag:")) return run.tags[column.slice(4)] ?? null;
  switch (column) {
    case "state": return STATE_ORDER.indexOf(run.state);
    case "run": return run.run_id;
    case "step": return run.step;
    case "progress": return run.end_step === null || run.end_step === 0 ? null : run.step / run.end_step;
    case "updated": return run.updated_ms;
    case "ended": return run.ended_ms;
    case "duration": return run.attempt === 0 ? null : (run.ended_ms ?? machineNow()) - run.submitted_ms;
    case "devices": return run.devices.join(",") || null;
    case "attempt": return run.attempt;
    case "priority": return run.priority;
    case "trainer": return run.trainer || null;
    case "parent": return run.parent_run_id || null;
    case "tags": return Object.entries(run.tags).join(" ") || null;
    case "notes": return run.notes || null;
    case "why": return run.reason || null;
    case "exactness": return run.exactness.state;
    default: return run.submitted_ms;
  }
}

const byNumber = new Intl.Collator("en", { numeric: true }).compare;

export function compareKeys(left: SortKey, right: SortKey): number {
  if (typeof left === "number" && typeof right === "number") return left - right;
  return byNumber(String(left), String(right));
}

/** Equal keys: the newest first, then by id, so that a live table does not jump. */
export function sortRuns(runs: readonly Run[], sort: string): Run[] {
  const isDown = sort.startsWith("-");
  const column = isDown ? sort.slice(1) : sort;
  const keyed = runs.map((run) => ({ run, key: sortKey(run, column) }));
  keyed.sort((left, right) => {
    if ((left.key === null) !== (right.key === null)) return left.key === null ? 1 : -1;
    const order = left.key === null ? 0 : compareKeys(left.key, right.key);
    if (order !== 0) return isDown ? -order : order;
    return right.run.submitted_ms - left.run.submitted_ms || byNumber(left.run.run_id, right.run.run_id);
  });
  return keyed.map(({ run }) => run);
}

/** The oldest known ancestor: a run that was resumed or forked stands with all that came of it. */
export function findRoot(run: Run, all: ReadonlyMap<string, Run>): string {
  const seen = new Set<string>();
  let id = run.run_id;
  let parent = run.parent_run_id;
  while (parent !== "" && !seen.has(parent)) {
    seen.add(parent);
    id = parent;
    parent = all.get(parent)?.parent_run_id ?? "";
  }
  return id;
}

function groupOf(run: Run, by: string, all: ReadonlyMap<string, Run>): string {
  if (by.startsWith("tag:")) return run.tags[by.slice(4)] ?? "";
  switch (by) {
    case "parent": return findRoot(run, all);
    case "state": return run.state;
    case "trainer": return run.trainer;
    default: return "";
  }
}

/** Groups in the order of their first runs; runs without a value come last. */
export function groupRuns(runs: readonly Run[], query: TableQuery, all: ReadonlyMap<string, Run>): Item[] {
  if (query.by === "") return runs.map((run) => ({ kind: "run", run }));
  const groups = new Map<string, Run[]>();
  for (const run of runs) {
    const key = groupOf(run, query.by, all);
    const members = groups.get(key);
    if (members === undefined) groups.set(key, [run]);
    else members.push(run);
  }
  const none = groups.get("");
  if (none !== undefined) {
    groups.delete("");
    groups.set("", none);
  }
  const shut = new Set(query.shut);
  return [...groups].flatMap(([key, members]): Item[] => {
    const isShut = shut.has(key);
    const head: Item = { kind: "group", key, label: key, runs: members, isShut };
    return isShut ? [head] : [head, ...members.map((run): Item => ({ kind: "run", run }))];
  });
}

export function countStates(runs: Iterable<Run>): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const run of runs) counts[run.state] = (counts[run.state] ?? 0) + 1;
  return counts;
}

/** The metric that says most about a run: its training loss, else some other loss, else the first. */
export function mainMetric(run: Run): string | null {
  const names = Object.keys(run.metrics);
  return names.find((name) => name === "train/loss") ?? names.find((name) => name.endsWith("loss")) ?? names.sort()[0] ?? null;
}

/** Metrics that say little in a narrow table. */
const QUIET = /^(train\/lr|lr|learning_rate|.*(time|_s|per_s|throughput|epoch|.*norm.*|memory.*))$/;

/** Up to `count` metrics of a run worth a place in a narrow column: the main one, then validation, then the rest. */
export function topMetrics(run: Run, count: number): string[] {
  const main = mainMetric(run);
  const rank = (name: string): number =>
    name === main ? 0 : name.startsWith("val/") ? 1 : name.startsWith("test/") ? 2 : QUIET.test(name) ? 4 : 3;
  return Object.keys(run.metrics).sort((left, right) => rank(left) - rank(right) || byNumber(left, right)).slice(0, count);
}

export interface Spread {
  name: string;
  min: number;
  median: number;
  max: number;
}

/** How a metric lies over all runs of a group: the metric that most of them have as their main one. */
export function readSpread(runs: readonly Run[]): Spread | null {
  const votes = new Map<string, number>();
  for (const run of runs) {
    const name = mainMetric(run);
    if (name !== null) votes.set(name, (votes.get(name) ?? 0) + 1);
  }
  const [winner] = [...votes].sort((left, right) => right[1] - left[1]);
  if (winner === undefined) return null;
  const [name] = winner;
  const values = runs.flatMap((run) => (run.metrics[name] === undefined ? [] : [toNumber(run.metrics[name])]))
    .filter(Number.isFinite).sort((left, right) => left - right);
  const middle = values[Math.floor((values.length - 1) / 2)];
  const after = values[Math.ceil((values.length - 1) / 2)];
  if (middle === undefined || after === undefined) return null;
  return { name, min: values[0] ?? middle, median: (middle + after) / 2, max: values.at(-1) ?? middle };
}

/** Steps per ms over the newest part of a curve; null where it cannot be told. */
export function readSpeed(steps: readonly number[], timestampsMs: readonly number[]): number | null {
  const last = steps.length - 1;
  if (last < 1) return null;
  const first = Math.max(0, last - Math.max(4, Math.floor(steps.length / 4)));
  const numSteps = (steps[last] ?? 0) - (steps[first] ?? 0);
  const time = (timestampsMs[last] ?? 0) - (timestampsMs[first] ?? 0);
  return numSteps > 0 && time > 0 ? numSteps / time : null;
}

/** How long a running run still takes, in ms; null where nobody knows. */
export function estimateLeft(run: Run, speed: number | null): number | null {
  if (isTerminal(run) || run.state !== "RUNNING" || speed === null || run.end_step === null) return null;
  return Math.max(0, (run.end_step - run.step) / speed);
}
