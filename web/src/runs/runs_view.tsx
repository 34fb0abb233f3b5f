/* All runs: a live table with filters, groups and a selection. */

import "./runs.css";

import { computed, signal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

import { askCancel, askEdit, askRemove } from "../actions/actions";
import { formatCount, formatPlural } from "../format";
import { compareUrl, navigate, query, runUrl, setQuery } from "../router";
import { useShortcuts } from "../shortcuts";
import { loaded, loadError, loadRuns, runs } from "../store";
import { isTerminal, type Run } from "../types";
import { Button } from "../ui/controls";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { countStates, filterRuns, groupRuns, readTableQuery, sortRuns } from "./selection";
import { RunTable } from "./run_table";
import { Toolbar } from "./toolbar";
import { refreshTrends } from "./trends";

const tableQuery = computed(() => readTableQuery(query.value));
const matching = computed(() => sortRuns(filterRuns(runs.value.values(), tableQuery.value), tableQuery.value.sort));
const items = computed(() => groupRuns(matching.value, tableQuery.value, runs.value));
const picked = computed(() => query.value.getAll("pick").filter((id) => runs.value.has(id)));

/** The row that the keyboard is at: an index into the items. */
const current = signal(-1);
/** Runs in view, as the table says after scrolling. */
const visible = signal<readonly Run[]>([]);

const MAX_PICKED = 100;

function togglePick(runId: string): void {
  const old = picked.value;
  const next = old.includes(runId) ? old.filter((id) => id !== runId) : [...old, runId].slice(-MAX_PICKED);
  setQuery({ pick: next });
}

function moveCurrent(step: number): void {
  const last = items.value.length - 1;
  const next = Math.min(last, Math.max(0, current.value + step));
  current.value = next;
}

function currentRun(): Run | null {
  const item = items.value[current.value];
  return item?.kind === "run" ? item.run : null;
}

function openCurrent(): void {
  const item = items.value[current.value];
  if (item?.kind === "run") navigate(runUrl(item.run.run_id));
  else if (item?.kind === "group") toggleGroup(item.key);
}

function toggleGroup(key: string): void {
  const { shut } = tableQuery.value;
  setQuery({ shut: shut.includes(key) ? shut.filter((one) => one !== key) : [...shut, key] });
}

function Selection() {
  const ids = picked.value;
  if (ids.length === 0) return null;
  const chosen = ids.flatMap((id) => runs.value.get(id) ?? []);
  const numLive = chosen.filter((run) => !isTerminal(run)).length;
  return (
    <div class="selection" role="region" aria-label="Selected runs">
      <strong>{formatPlural(ids.length, "run")} selected</strong>
      <Button kind="primary" isSmall icon="compare" disabled={ids.length < 2} onClick={() => navigate(compareUrl(ids))}>Compare</Button>
      {numLive > 0 && <Button isSmall icon="stop" onClick={() => askCancel(chosen)}>Cancel…</Button>}
      {numLive < chosen.length && <Button isSmall icon="trash" onClick={() => askRemove(chosen)}>Remove…</Button>}
      <Button kind="quiet" isSmall icon="close" onClick={() => setQuery({ pick: null })}>Clear</Button>
    </div>
  );
}

function Summary() {
  const counts = countStates(runs.value.values());
  const all = runs.value.size;
  const shown = matching.value.length;
  const parts = [
    shown === all ? formatPlural(all, "run") : `${formatCount(shown)} of ${formatPlural(all, "run")}`,
    ...(counts["RUNNING"] === undefined ? [] : [`${formatCount(counts["RUNNING"])} running`]),
    ...(counts["PENDING"] === undefined ? [] : [`${formatCount(counts["PENDING"])} waiting`]),
  ];
  return <p class="muted summary" role="status">{parts.join(" · ")}{loaded.value === "partial" ? " · loading more…" : ""}</p>;
}

export function RunsView() {
  const filter = useRef<HTMLInputElement>(null);

  useShortcuts([
    { keys: "/", label: "Filter runs", run: () => filter.current?.focus() },
    { keys: "j", label: "Next row", run: () => moveCurrent(1) },
    { keys: "k", label: "Previous row", run: () => moveCurrent(-1) },
    { keys: "o", label: "Open the row", run: openCurrent },
    { keys: "x", label: "Select the row", run: () => { const run = currentRun(); if (run !== null) togglePick(run.run_id); } },
    { keys: "e", label: "Edit name, notes and tags of the row", run: () => { const run = currentRun(); if (run !== null) askEdit(run); } },
    { keys: "c", label: "Compare selected runs", run: () => { if (picked.value.length > 1) navigate(compareUrl(picked.value)); } },
  ]);

  useSignalEffect(() => {
    const inView = visible.value;
    const all = runs.value; // the records move on while the rows stay
    const chosen = query.value.get("trend");
    const fresh = inView.flatMap((run) => all.get(run.run_id) ?? []);
    const timer = setTimeout(() => void refreshTrends(fresh, chosen), 120);
    return () => clearTimeout(timer);
  });

  useEffect(() => { current.value = -1; }, [query.value.get("q"), query.value.get("sort"), query.value.get("by")]);

  if (loadError.value !== null && runs.value.size === 0) return <ErrorNotice error={loadError.value} retry={() => void loadRuns()} />;
  if (loaded.value === "loading") return <Loading what="runs" />;

  return (
    <div class="runs">
      <div class="view-head">
        <h1>Runs</h1>
        <Summary />
        <span class="grow" />
        <a class="button primary" href="/submit">Submit a run</a>
      </div>
      {runs.value.size > 0 && <Toolbar filter={filter} query={tableQuery.value} all={runs.value} />}
      <Selection />
      {runs.value.size === 0 ? (
        <Empty title="No runs yet">
          <p>Start one in a terminal: <code>trn run job.yaml</code>, or fill in <a href="/submit">the form</a>.</p>
        </Empty>
      ) : items.value.length === 0 ? (
        <Empty title="No runs match these filters">
          <Button onClick={() => setQuery({ q: null, state: null, tag: null })}>Clear filters</Button>
        </Empty>
      ) : (
        <RunTable items={items.value} picked={picked.value} current={current} visible={visible} sort={tableQuery.value.sort}
          onPick={togglePick} onToggleGroup={toggleGroup} />
      )}
    </div>
  );
}
