/* Two or more runs over each other: curves, what differs, and where they part. */

import "../chart/chart.css";
import "./compare.css";

import { useEffect, useMemo, useState } from "preact/hooks";

import { api, get } from "../api";
import { type Board, Charts, useBoard } from "../chart/board";
import { chartId } from "../chart/chart";
import { lineColour } from "../chart/colours";
import { readSeries } from "../chart/curve";
import { type CurveSet, MetricFeed } from "../chart/feed";
import { formatCount, formatNumber, formatPlural } from "../format";
import { query, runUrl, setQuery } from "../router";
import { asApiError, loaded, loadError, runs, stream } from "../store";
import { isTerminal, type Num, type Run } from "../types";
import { useAnswer } from "../run/answer";
import { Button, Segmented } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { toast } from "../ui/overlay";
import { StateBadge } from "../ui/state";
import {
  type Comparison, differencesOf, type Divergence, type Part, PARTS, showValue, unknownOf, zoomAtStep,
} from "./comparison";
import { NO_CLOCK, readClocks } from "../chart/run_clocks";

const MAX_RUNS = 100;
const MAX_FOLLOWED = 12;
const POLL_MS = 5000;
const FEW = 10;
const SHORT = 24; // characters of a value that stays on one line

export function CompareView() {
  const asked = [...new Set(query.value.getAll("run"))];
  const unknown = asked.filter((id) => !runs.value.has(id));
  if (unknown.length > 0 && loaded.value !== "all" && loadError.value === null) return <Loading what="runs" />;
  const ids = asked.filter((id) => !unknown.includes(id));
  return (
    <>
      {unknown.length > 0 && (
        <p class="card body gone-runs" role="status">
          <Icon name="info" /> <span>Not there, perhaps removed: {unknown.join(", ")}.</span>
          <Button isSmall onClick={() => setQuery({ run: ids })}>Leave out</Button>
        </p>
      )}
      {ids.length < 2 || ids.length > MAX_RUNS ? <Choose ids={ids} /> : <Compared ids={ids} key={ids.join("\n")} />}
    </>
  );
}

function Choose({ ids }: { ids: readonly string[] }) {
  const isMany = ids.length > MAX_RUNS;
  return (
    <>
      <h1 class="visually-hidden">Compare</h1>
      <Empty title={isMany ? `${ids.length} runs are too many` : "Choose runs to compare"}>
        <p>{isMany ? `Up to ${MAX_RUNS} runs can be compared.` : "Choose two or more in the table of runs, or add them here."}</p>
        {!isMany && <AddRun ids={ids} />}
        {ids.map((id) => <p key={id}><a href={runUrl(id)}>{id}</a></p>)}
      </Empty>
    </>
  );
}

function AddRun({ ids }: { ids: readonly string[] }) {
  const add = (id: string): void => {
    if (runs.peek().has(id) && !ids.includes(id)) setQuery({ run: [...ids, id] }, { push: true });
  };
  return (
    <>
      <input class="input add-run" list="all-runs" placeholder="Add a run" aria-label="Add a run"
        onChange={(event) => {
          add(event.currentTarget.value);
          event.currentTarget.value = "";
        }} />
      <datalist id="all-runs">
        {[...runs.value.keys()].filter((id) => !ids.includes(id)).slice(0, 500).map((id) => <option key={id} value={id} />)}
      </datalist>
    </>
  );
}

function makeFeed(ids: readonly string[]): MetricFeed {
  return new MetricFeed(async ({ names, steps, maxPoints }, abort) => {
    const found = await api.getManyMetrics(
      { run: ids, name: names, from_step: steps?.[0], to_step: steps?.[1], max_points: maxPoints }, abort,
    );
    const sets = new Map<string, CurveSet>(names.map((name) => [name, new Map()]));
    for (const [runId, { series }] of Object.entries(found.runs)) {
      for (const one of series) sets.get(one.name)?.set(runId, { curve: readSeries(one), discarded: [] });
    }
    return sets;
  }, ids.length > FEW ? 400 : 800, (error) => toast(asApiError(error).message, "bad"));
}

function Compared({ ids }: { ids: readonly string[] }) {
  const board = useBoard(() => makeFeed(ids), ids.join("\n"));
  const answer = useAnswer((abort) => get<Comparison>(["compare"], { run: ids }, abort), ids.join("\n"));
  useClocks(board, ids);
  useLive(board, ids);
  const names = useMemo(
    () => [...new Set([...ids.flatMap((id) => Object.keys(runs.value.get(id)?.metrics ?? {})), ...Object.keys(answer.value?.metrics ?? {})])],
    [runs.value, answer.value],
  );
  return (
    <div class="compare-view">
      <div class="view-head"><h1>Compare {formatPlural(ids.length, "run")}</h1><span class="grow" /><AddRun ids={ids} /></div>
      <Legend board={board} ids={ids} />
      {answer.error !== null && <ErrorNotice error={answer.error} retry={answer.reload} />}
      {answer.value === null && answer.error === null && <Loading what="differences" />}
      {answer.value !== null && <Partings board={board} comparison={answer.value} />}
      {answer.value !== null && <Differences comparison={answer.value} />}
      <Charts board={board} names={names} hasEnded={ids.every((id) => { const run = runs.value.get(id); return run !== undefined && isTerminal(run); })} />
    </div>
  );
}

/** Places of points in time need to know when attempts ran. Of many runs only where that is asked for. */
function useClocks(board: Board, ids: readonly string[]): void {
  const kind = board.state.value.kind;
  const isWanted = ids.length <= FEW || kind === "training" || kind === "epoch";
  useEffect(() => {
    board.runs.value = ids.map((runId, index) => ({ runId, label: runId, index, clock: NO_CLOCK }));
  }, [board]);
  useEffect(() => {
    if (!isWanted) return;
    const abort = new AbortController();
    void readClocks(ids, abort.signal).then((clocks) => {
      if (abort.signal.aborted) return;
      board.runs.value = board.runs.peek().map((run) => ({ ...run, clock: clocks.get(run.runId) ?? NO_CLOCK }));
    });
    return () => abort.abort();
  }, [board, isWanted]);
}

function useLive(board: Board, ids: readonly string[]): void {
  const liveIds = ids.filter((id) => {
    const run = runs.value.get(id);
    return run !== undefined && !isTerminal(run);
  }).join("\n");
  useEffect(() => {
    const live = liveIds.split("\n").filter((id) => id !== "");
    if (live.length > MAX_FOLLOWED) {
      const timer = setInterval(() => { if (!document.hidden) board.feed.refetch(); }, POLL_MS);
      return () => clearInterval(timer);
    }
    const stops = live.map((runId) => stream.subscribe({
      topic: { kind: "events", runId },
      onSync: () => board.feed.refetch(),
      onMessage: (message) => { if (message.kind === "events") board.feed.take(runId, message.data.events); },
    }));
    return () => { for (const stop of stops) stop(); };
  }, [board, liveIds]);
}

function Legend({ board, ids }: { board: Board; ids: readonly string[] }) {
  const hidden = board.hidden.value;
  const toggle = (id: string): void => {
    const next = new Set(hidden);
    if (!next.delete(id)) next.add(id);
    board.hidden.value = next;
  };
  return (
    <ul class={`legend${ids.length > FEW ? " many" : ""}`} aria-label="Runs">
      {ids.map((id, index) => {
        const run: Run | undefined = runs.value.get(id);
        return (
          <li key={id} class={board.highlight.value === id ? "is-high" : ""} onMouseEnter={() => { board.highlight.value = id; }}
            onMouseLeave={() => { board.highlight.value = null; }}>
            <label class="check">
              <input type="checkbox" checked={!hidden.has(id)} onChange={() => toggle(id)} aria-label={`Show ${id}`} />
              <i class="swatch" style={{ background: lineColour(index) }} />
            </label>
            <a class="ellipsis" href={runUrl(id)} title={id} onFocus={() => { board.highlight.value = id; }} onBlur={() => { board.highlight.value = null; }}>{id}</a>
            {run !== undefined && ids.length <= FEW && <StateBadge run={run} />}
            <Button kind="quiet" isSmall icon="close" label={`Remove ${id} from the comparison`}
              onClick={() => setQuery({ run: ids.filter((one) => one !== id) }, { push: true })} />
          </li>
        );
      })}
    </ul>
  );
}

/** Where curves part, and why. */
function Partings({ board, comparison }: { board: Board; comparison: Comparison }) {
  const [first, ...others] = comparison.runs;
  const parted = new Set(comparison.divergences.map(({ runs: [, other] }) => other));
  const equal = others.filter((id, i) => !parted.has(id) && (comparison.num_common[i] ?? 0) > 0);
  const unread = new Set(comparison.unknown["metrics"] ?? []);
  const isUnread = (id: string): boolean => unread.has(id) || unread.has(first ?? "");
  const long = others.filter(isUnread);
  const apart = others.filter((id, i) => !isUnread(id) && (comparison.num_common[i] ?? 0) === 0);
  const [limit, setLimit] = useState(3);
  return (
    <section class="card" aria-label="Where they part">
      <header><h2>Where they part, and why</h2></header>
      <ul class="body partings">
        {comparison.divergences.slice(0, limit).map((one) => <Parting key={one.runs.join()} board={board} comparison={comparison} divergence={one} />)}
        {comparison.divergences.length > limit && (
          <li><Button isSmall onClick={() => setLimit(MAX_RUNS)}>Show all {formatCount(comparison.divergences.length)}</Button></li>
        )}
        {equal.length > 0 && <li><Icon name="completed" /> {list(equal)} and {first}: every metric is equal at every step that both have.</li>}
        {apart.length > 0 && <li class="muted">{list(apart)} and {first}: no metric at a step that both have.</li>}
        {long.length > 0 && <li class="muted">{list(long)} and {first}: too many points to compare them here. <code>trn compare</code> does it.</li>}
      </ul>
    </section>
  );
}

const list = (ids: readonly string[]): string =>
  ids.length > 3 ? `${ids.slice(0, 3).join(", ")} and ${ids.length - 3} more` : ids.join(", ");

const MAX_CAUSES = 6;
const FEW_CAUSES = 2; // of each of many runs: the charts below must not be far

function Parting({ board, comparison, divergence }: { board: Board; comparison: Comparison; divergence: Divergence }) {
  const { runs: [one, other], metric, step, values, num_equal: numEqual } = divergence;
  const differences = differencesOf(comparison, one, other);
  const unknown = unknownOf(comparison, [one, other]);
  const most = comparison.divergences.length > 2 ? FEW_CAUSES : MAX_CAUSES;
  const jump = (): void => {
    board.update({ kind: "step", xMetric: "", zoom: zoomAtStep(step), search: "", hidden: [], large: metric });
    board.cursor.value = step;
    requestAnimationFrame(() => document.getElementById(chartId(metric))?.scrollIntoView({ block: "center" }));
  };
  return (
    <li>
      <p>
        <b>{other}</b> parts from <b>{one}</b> at <b>step {formatCount(step)}</b>: <span class="mono">{metric}</span> is {exact(values[1])}, not {exact(values[0])}.{" "}
        <span class="muted">{numEqual === 0 ? "It differs from the first common step on." : `${formatPlural(numEqual, "step")} before it ${numEqual === 1 ? "is" : "are"} equal.`}</span>{" "}
        <Button isSmall icon="search" onClick={jump}>Show step {formatCount(step)}</Button>
      </p>
      {differences.length === 0 ? (
        <p class="muted">No difference is known that explains it{unknown.length > 0 ? `: ${unknown.join(" and ")} of one of them is not known` : ""}.</p>
      ) : (
        <ul class="causes">
          {differences.slice(0, most).map(({ part, name, values: [before, after] }) => (
            <li key={`${part} ${name}`}><span class="muted">{part}</span> <span class="mono">{name}</span>: {part === "code" ? codeWords(before, after) : <><span class="mono">{showValue(before)}</span> → <span class="mono">{showValue(after)}</span></>}</li>
          ))}
          {differences.length > most && <li class="muted">and {formatCount(differences.length - most)} more below</li>}
        </ul>
      )}
    </li>
  );
}

const codeWords = (before: unknown, after: unknown): string => (before === null ? "only in the second" : after === null ? "only in the first" : "changed");

const exact = (value: Num | null): string => formatNumber(value ?? "nan", 7);

const LABELS: Record<Part | "metrics", string> = { config: "Config", code: "Code", packages: "Packages", data: "Data", metrics: "Last values" };

/** Only what differs. */
function Differences({ comparison }: { comparison: Comparison }) {
  const counts = Object.fromEntries([...PARTS, "metrics" as const].map((part) => [part, Object.keys(comparison[part]).length])) as Record<Part | "metrics", number>;
  const wanted = query.value.get("part") as Part | "metrics" | null;
  const part = wanted !== null && wanted in LABELS ? wanted : (PARTS.find((one) => counts[one] > 0) ?? "metrics");
  const unknown = comparison.unknown[part] ?? [];
  const rows = Object.entries(comparison[part]);
  return (
    <section class="card" aria-label="Differences">
      <header class="row">
        <h2>What differs</h2>
        <Segmented label="Part" value={part} onChange={(value) => setQuery({ part: value })}
          options={([...PARTS, "metrics"] as const).map((value) => ({ value, label: value === "metrics" ? LABELS.metrics : `${LABELS[value]} ${formatCount(counts[value])}` }))} />
      </header>
      {unknown.length > 0 && <p class="unknown muted">Not known for {list(unknown)}.</p>}
      {rows.length === 0 ? <p class="unknown muted">Nothing differs.</p> : (
        <div class="scroll differences" tabIndex={0} role="group" aria-label={`Differences of ${LABELS[part].toLowerCase()}`}>
          <table class="table">
            <thead>
              <tr><th scope="col">{part === "code" ? "File" : "Name"}</th>
                {comparison.runs.map((id, i) => <th scope="col" key={id}><i class="swatch" style={{ background: lineColour(i) }} /> {id}</th>)}</tr>
            </thead>
            <tbody>
              {rows.map(([name, values]) => (
                <tr key={name}>
                  <th scope="row" class="mono">{name}</th>
                  {comparison.runs.map((id, i) => {
                    const text = part === "metrics" ? formatNumber(values[i] as Num | null, 6) : showValue(values[i]);
                    const isSame = JSON.stringify(values[i] ?? null) === JSON.stringify(values[0] ?? null);
                    return <td key={id} class={`mono${isSame ? " same" : ""}${text.length <= SHORT ? " short" : ""}`}>{text}</td>;
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
