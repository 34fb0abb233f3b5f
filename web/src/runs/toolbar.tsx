/* Filters, groups and columns of the table of runs. */

import type { RefObject } from "preact";
import { useMemo } from "preact/hooks";

import { formatCount } from "../format";
import { setQuery } from "../router";
import type { Run } from "../types";
import { Button } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Menu } from "../ui/overlay";
import { stateWord } from "../ui/state";
import { chooseColumns, columnKeys, toggleColumn } from "./chosen_columns";
import { COLUMNS, DEFAULT_COLUMNS } from "./columns";
import { countStates, type TableQuery } from "./selection";

const STATES = ["RUNNING", "DISPATCHING", "PENDING", "COMPLETED", "FAILED", "CANCELLED"];
const FILTER_HELP = 'Words must all match. -word excludes, /regex/ matches, loss<0.5 compares the newest value of a metric.';
const MAX_OPTIONS = 200;

interface Known {
  tags: Map<string, Set<string>>; // values by key
  metrics: Set<string>;
  hasTrainers: boolean;
  hasParents: boolean;
}

function collect(all: ReadonlyMap<string, Run>): Known {
  const known: Known = { tags: new Map(), metrics: new Set(), hasTrainers: false, hasParents: false };
  for (const run of all.values()) {
    for (const [key, value] of Object.entries(run.tags)) {
      const values = known.tags.get(key);
      if (values === undefined) known.tags.set(key, new Set([value]));
      else values.add(value);
    }
    if (run.trainer !== "") known.hasTrainers = true;
    if (run.parent_run_id !== "") known.hasParents = true;
    for (const name of Object.keys(run.metrics)) known.metrics.add(name);
  }
  return known;
}

export function Toolbar({ filter, query, all }: {
  filter: RefObject<HTMLInputElement | null>;
  query: TableQuery;
  all: ReadonlyMap<string, Run>;
}) {
  // What can be chosen changes rarely; runs change ten times a second.
  const known = useMemo(() => collect(all), [all.size, Math.floor(Date.now() / 5000)]);
  const hasFilter = query.text !== "" || query.states.length > 0 || query.tags.length > 0;
  return (
    <div class="toolbar" role="search">
      <div class="filter">
        <Icon name="search" />
        <input ref={filter} class="input" type="search" aria-label="Filter runs" placeholder="Filter: words, -word, /regex/, loss<0.5"
          title={FILTER_HELP} value={query.text} spellcheck={false} autocomplete="off"
          onInput={(event) => setQuery({ q: event.currentTarget.value })}
          onKeyDown={(event) => { if (event.key === "Escape") document.querySelector<HTMLElement>(".scroller")?.focus(); }} />
      </div>
      <StateFilter query={query} all={all} />
      <TagFilter query={query} known={known} />
      <GroupBy query={query} known={known} />
      <ColumnMenu known={known} />
      {hasFilter && (
        <Button kind="quiet" icon="close" onClick={() => setQuery({ q: null, state: null, tag: null })}>Clear filters</Button>
      )}
    </div>
  );
}

const toggle = (list: readonly string[], one: string): string[] =>
  list.includes(one) ? list.filter((other) => other !== one) : [...list, one];

function StateFilter({ query, all }: { query: TableQuery; all: ReadonlyMap<string, Run> }) {
  const counts = countStates(all.values());
  const text = query.states.length === 0 ? "State" : query.states.map(stateWord).join(", ");
  return (
    <Menu label="Filter by state" text={text} icon="filter" kind="plain" isLeft>
      {STATES.map((state) => (
        <label key={state} class="check">
          <input type="checkbox" checked={query.states.includes(state)} onChange={() => setQuery({ state: toggle(query.states, state) })} />
          <span class="grow">{stateWord(state)}</span>
          <span class="muted">{formatCount(counts[state] ?? 0)}</span>
        </label>
      ))}
    </Menu>
  );
}

function TagFilter({ query, known }: { query: TableQuery; known: Known }) {
  if (known.tags.size === 0 && query.tags.length === 0) return null;
  const options = [...known.tags].sort().flatMap(([key, values]) => [...values].sort().map((value) => `${key}:${value}`)).slice(0, MAX_OPTIONS);
  return (
    <Menu label="Filter by tag" text={query.tags.length === 0 ? "Tags" : query.tags.join(", ")} icon="tag" kind="plain" isLeft>
      {options.map((tag) => (
        <label key={tag} class="check">
          <input type="checkbox" checked={query.tags.includes(tag)} onChange={() => setQuery({ tag: toggle(query.tags, tag) })} />
          {tag.replace(":", ": ")}
        </label>
      ))}
    </Menu>
  );
}

function GroupBy({ query, known }: { query: TableQuery; known: Known }) {
  const options = [
    ["", "No groups"],
    ...(known.hasParents ? [["parent", "Parent"]] : []),
    ["state", "State"],
    ...(known.hasTrainers ? [["trainer", "Trainer"]] : []),
    ...[...known.tags.keys()].sort().map((key) => [`tag:${key}`, key === "group" ? "Group" : `Tag ${key}`]),
  ] as [string, string][];
  if (!options.some(([key]) => key === query.by)) options.push([query.by, query.by]);
  return (
    <label class="group-by">
      <span class="visually-hidden">Group by</span>
      <select class="input" value={query.by} onChange={(event) => setQuery({ by: event.currentTarget.value, shut: null })}>
        {options.map(([key, label]) => <option key={key} value={key}>{key === "" ? label : `By ${label.toLowerCase()}`}</option>)}
      </select>
    </label>
  );
}

function ColumnMenu({ known }: { known: Known }) {
  const keys = columnKeys.value;
  const order = COLUMNS.map((column) => column.key);
  const entry = (key: string, label: string) => (
    <label key={key} class="check">
      <input type="checkbox" checked={keys.includes(key)} disabled={key === "run"} onChange={() => chooseColumns(toggleColumn(keys, key, order))} />
      {label}
    </label>
  );
  return (
    <div class="only-wide">
      <Menu label="Columns" text="Columns" icon="columns" kind="plain" isLeft>
        {COLUMNS.map((column) => entry(column.key, column.label))}
        {known.metrics.size > 0 && <hr />}
        {[...known.metrics].sort().slice(0, MAX_OPTIONS).map((name) => entry(`m:${name}`, name))}
        {known.tags.size > 0 && <hr />}
        {[...known.tags.keys()].sort().map((name) => entry(`tag:${name}`, `tag ${name}`))}
        <hr />
        <button type="button" onClick={() => chooseColumns(DEFAULT_COLUMNS)}>Default columns</button>
      </Menu>
    </div>
  );
}
