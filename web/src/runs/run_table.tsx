/* The table itself. Only rows in view are in the document, so that 10,000 runs scroll like 10. */

import { type Signal, signal, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";

import { listActions } from "../actions/actions";
import { formatCount, formatNumber } from "../format";
import { query, setQuery } from "../router";
import type { Run } from "../types";
import { Icon } from "../ui/icon";
import { Menu } from "../ui/overlay";
import { StateBadge, stateWord } from "../ui/state";
import { chosenColumns } from "./chosen_columns";
import { type Column, Details, Duration, Progress, RunName, TimeLeft } from "./columns";
import { countStates, type Item, readSpread } from "./selection";
import { Sparkline } from "./sparkline";
import { findRow, measureRows } from "./virtual_rows";

const ROW = 38;
const CARD = 96;
const CARD_GROUP = 44;
const SPARE = 8; // rows kept beyond the edges

const narrow = typeof matchMedia === "undefined" ? null : matchMedia("(max-width: 640px)");
const isNarrow = signal(narrow?.matches ?? false);
narrow?.addEventListener("change", (event) => { isNarrow.value = event.matches; });

interface TableProps {
  items: readonly Item[];
  picked: readonly string[];
  current: Signal<number>;
  visible: Signal<readonly Run[]>;
  sort: string;
  onPick: (runId: string) => void;
  onToggleGroup: (key: string) => void;
}

export function RunTable(props: TableProps) {
  const { items, current, visible } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const range = useRef(signal({ top: 0, bottom: 1500 })).current;
  const tops = useMemo(
    () => measureRows(items.map((item) => (!isNarrow.value ? ROW : item.kind === "group" ? CARD_GROUP : CARD))),
    [items, isNarrow.value],
  );

  const measure = (): void => {
    const box = scroller.current;
    if (box === null) return;
    const top = Math.floor(box.scrollTop / ROW) * ROW;
    const bottom = top + box.clientHeight + ROW;
    if (top !== range.value.top || bottom !== range.value.bottom) range.value = { top, bottom };
  };

  useEffect(() => {
    measure();
    const box = scroller.current;
    if (box === null) return;
    const observer = new ResizeObserver(measure);
    observer.observe(box);
    return () => observer.disconnect();
  }, []);

  const start = Math.max(0, findRow(tops, range.value.top) - SPARE);
  const shown = items.slice(start, findRow(tops, range.value.bottom) + 1 + SPARE);

  useEffect(() => {
    const inView = shown.flatMap((item) => (item.kind === "run" ? [item.run] : []));
    const old = visible.peek();
    if (inView.length !== old.length || inView.some((run, index) => run.run_id !== old[index]?.run_id)) visible.value = inView;
  });

  useSignalEffect(() => {
    const box = scroller.current;
    const at = current.value;
    if (box === null || at < 0) return;
    const top = tops[at] ?? 0;
    const bottom = tops[at + 1] ?? top;
    const room = box.clientHeight - (isNarrow.peek() ? 0 : ROW); // the head covers one row
    if (top < box.scrollTop) box.scrollTop = top;
    else if (bottom > box.scrollTop + room) box.scrollTop = bottom - room;
    // Keyboard and screen reader are at the row, too. It may not be drawn yet.
    const frame = requestAnimationFrame(() => requestAnimationFrame(() =>
      box.querySelector<HTMLElement>(`[data-at="${at}"] :is(.run-name a, .group-head)`)?.focus({ preventScroll: true })));
    return () => cancelAnimationFrame(frame);
  });

  const before = tops[start] ?? 0;
  const after = (tops.at(-1) ?? 0) - (tops[start + shown.length] ?? 0);
  const body = { ...props, shown, start, before, after };
  return (
    <div class="scroller card" ref={scroller} onScroll={measure} tabIndex={0} role="region" aria-label="Runs">
      {isNarrow.value ? <Cards {...body} /> : <Rows {...body} />}
    </div>
  );
}

interface BodyProps extends TableProps {
  shown: readonly Item[];
  start: number;
  before: number; // px of rows above and below that are not in the document
  after: number;
}

function Rows({ shown, start, before, after, items, picked, current, sort, onPick, onToggleGroup }: BodyProps) {
  const columns = chosenColumns.value;
  const chosen = new Set(picked);
  const width = columns.reduce((sum, column) => sum + column.width, 36 + 44);
  return (
    <table class="runs-table" style={{ minWidth: `${width}px` }} aria-rowcount={items.length + 1}>
      <colgroup>
        <col style={{ width: "36px" }} />
        {columns.map((column, index) => (
          <col key={column.key} {...(index === columns.length - 1 ? {} : { style: { width: `${column.width}px` } })} />
        ))}
        <col style={{ width: "44px" }} />
      </colgroup>
      <thead>
        <tr aria-rowindex={1}>
          <th scope="col"><span class="visually-hidden">Selected</span></th>
          {columns.map((column) => <HeadCell key={column.key} column={column} sort={sort} />)}
          <th scope="col"><span class="visually-hidden">Actions</span></th>
        </tr>
      </thead>
      <tbody>
        {before > 0 && <tr aria-hidden="true" class="space"><td colSpan={columns.length + 2} style={{ height: `${before}px` }} /></tr>}
        {shown.map((item, index) => {
          const at = start + index;
          const isCurrent = at === current.value;
          if (item.kind === "group") {
            return (
              <tr key={`group ${item.key}`} data-at={at} aria-rowindex={at + 2} class={`group-row${isCurrent ? " is-current" : ""}`}>
                <td colSpan={columns.length + 2}><GroupHead item={item} onToggle={onToggleGroup} /></td>
              </tr>
            );
          }
          const { run } = item;
          return (
            <tr key={run.run_id} data-at={at} aria-rowindex={at + 2} class={`${isCurrent ? "is-current" : ""}${chosen.has(run.run_id) ? " is-picked" : ""}`}
              aria-selected={chosen.has(run.run_id)}>
              <td class="pick"><Pick run={run} isPicked={chosen.has(run.run_id)} onPick={onPick} /></td>
              {columns.map((column) => (
                <td key={column.key} class={column.isNumber === true ? "number" : ""}>{column.cell(run)}</td>
              ))}
              <td class="act"><Menu isSmall label={`Actions of ${run.run_id}`} items={listActions(run)} /></td>
            </tr>
          );
        })}
        {after > 0 && <tr aria-hidden="true" class="space"><td colSpan={columns.length + 2} style={{ height: `${after}px` }} /></tr>}
      </tbody>
    </table>
  );
}

/** Where each run has the whole width of a phone. */
function Cards({ shown, start, before, after, picked, current, onPick, onToggleGroup }: BodyProps) {
  const chosen = new Set(picked);
  return (
    <ul class="run-cards" style={{ paddingTop: `${before}px`, paddingBottom: `${after}px` }}>
      {shown.map((item, index) => {
        const isCurrent = start + index === current.value ? " is-current" : "";
        if (item.kind === "group") {
          return <li key={`group ${item.key}`} data-at={start + index} class={`group-row${isCurrent}`}><GroupHead item={item} onToggle={onToggleGroup} /></li>;
        }
        const { run } = item;
        return (
          <li key={run.run_id} data-at={start + index} class={`run-card${isCurrent}${chosen.has(run.run_id) ? " is-picked" : ""}`}>
            <div class="line">
              <Pick run={run} isPicked={chosen.has(run.run_id)} onPick={onPick} />
              <RunName run={run} />
              <span class="grow" />
              <StateBadge run={run} />
              <Menu isSmall label={`Actions of ${run.run_id}`} items={listActions(run)} />
            </div>
            <div class="line">
              <Progress run={run} />
              <span class="muted ellipsis">{run.state === "RUNNING" ? <TimeLeft run={run} suffix=" left" /> : <Duration run={run} />}</span>
              <span class="grow" />
              <Sparkline run={run} />
            </div>
            <div class="line small">
              <Details run={run} count={2} />
            </div>
          </li>
        );
      })}
    </ul>
  );
}

function HeadCell({ column, sort }: { column: Column; sort: string }) {
  const isSorted = sort === column.key || sort === `-${column.key}`;
  const isDown = sort === `-${column.key}`;
  const kind = column.isNumber === true ? "number" : "";
  if (column.canSort === false) return <th scope="col" class={kind}><span>{column.label}</span></th>;
  return (
    <th scope="col" class={kind} aria-sort={isSorted ? (isDown ? "descending" : "ascending") : "none"}>
      <button type="button" onClick={() => setQuery({ sort: isDown ? column.key : `-${column.key}` })} title={`Sort by ${column.label}`}>
        {column.label}{isSorted && <Icon name={isDown ? "down" : "up"} size={12} />}
      </button>
    </th>
  );
}

function Pick({ run, isPicked, onPick }: { run: Run; isPicked: boolean; onPick: (runId: string) => void }) {
  return <input type="checkbox" aria-label={`Select ${run.run_id}`} checked={isPicked} onChange={() => onPick(run.run_id)} />;
}

function GroupHead({ item, onToggle }: { item: Extract<Item, { kind: "group" }>; onToggle: (key: string) => void }) {
  const by = query.value.get("by") ?? "";
  const label = item.label === "" ? "none" : by === "state" ? stateWord(item.label) : item.label;
  const counts = Object.entries(countStates(item.runs));
  const spread = isNarrow.value ? null : readSpread(item.runs);
  return (
    <button type="button" class="group-head" aria-expanded={!item.isShut} onClick={() => onToggle(item.key)}>
      <Icon name={item.isShut ? "right" : "down"} size={14} />
      <span class="muted">{by.replace(/^tag:/, "")}</span>
      <strong class="ellipsis">{label}</strong>
      <span class="tag">{formatCount(item.runs.length)}</span>
      {spread !== null && item.runs.length > 1 && (
        <span class="spread" title="Minimum, median and maximum of the newest values">
          <span class="muted">{spread.name}</span> {formatNumber(spread.min)} … <strong>{formatNumber(spread.median)}</strong> … {formatNumber(spread.max)}
        </span>
      )}
      {by !== "state" && <span class="muted ellipsis">{counts.map(([state, count]) => `${formatCount(count)} ${stateWord(state).toLowerCase()}`).join(" · ")}</span>}
    </button>
  );
}
