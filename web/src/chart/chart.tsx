/* One chart: a card with the metric's name, what the cursor reads, the picture and its menu. It fetches and paints only
   while it is on the screen. */

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";

import { formatCount, formatNumber, formatPlural, formatTime } from "../format";
import { asApiError } from "../store";
import { colourVersion } from "../theme";
import { Button } from "../ui/controls";
import { Dialog, Menu, toast } from "../ui/overlay";
import { pan, type Range, zoomAround } from "./axis";
import type { Board } from "./board";
import { readPalette } from "./colours";
import { type Column, alignRows, pickRows, toCsv } from "./csv";
import type { Palette } from "./paint";
import { painter } from "./painter";
import { drawPicture, saveCanvas, saveText } from "./picture";
import { Plot } from "./plot";
import { buildScene, type Reading, readAt, readEnds, type Scene } from "./scene";
import { formatSpan } from "./ticks";
import { type ChartState, isLog } from "./view_state";

/** Where a link or a jump finds it. */
export const chartId = (name: string): string => `chart-${encodeURIComponent(name)}`;

const MAX_ROWS = 200;
const MAX_READINGS = 6; // more are not readable: then only the nearest curve is said
const NEAR_PX = "300px";

export function Chart({ name, board }: { name: string; board: Board }) {
  const frame = useRef<HTMLElement>(null);
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(
      (entries) => setNear(entries.at(-1)?.isIntersecting ?? false),
      { rootMargin: NEAR_PX },
    );
    observer.observe(frame.current!);
    return () => observer.disconnect();
  }, []);
  const isLarge = board.state.value.large === name;
  return (
    <figure class={`chart card${isLarge ? " large" : ""}`} ref={frame} id={chartId(name)} aria-label={name}>
      {isNear ? <Body name={name} board={board} /> : <><header><h3 class="ellipsis">{name}</h3></header><div class="plot" /></>}
    </figure>
  );
}

interface Shown {
  plot: Plot;
  scene: Scene;
  palette: Palette;
}

function Body({ name, board }: { name: string; board: Board }) {
  const root = useRef<HTMLDivElement>(null);
  const shown = useRef<Shown | null>(null);
  const painted = useSignal(0);
  const isEmpty = useSignal(false);
  const [table, setTable] = useState<Column[] | null>(null);
  const [hasFocus, setFocus] = useState(false);

  useEffect(() => {
    const { events, feed } = board;
    const own = {
      onZoom: events.onZoom,
      onPick: (x: number) => events.onPick(name, stepAt(shown.current?.scene ?? null, x)),
      onCursor: (x: number | null, height: number) => {
        const scene = shown.current?.scene;
        events.onCursor(x, scene === undefined || x === null ? null : nearestRun(scene, x, height));
      },
    };
    const plot = new Plot(root.current!, `Chart of ${name}`, own);
    const font = `12px ${getComputedStyle(root.current!).fontFamily}`;
    let palette = readPalette();
    let colours = colourVersion.peek();
    const paint = (): void => {
      if (colours !== colourVersion.peek()) {
        colours = colourVersion.peek();
        palette = readPalette();
      }
      const sources = board.sources(name);
      isEmpty.value = sources !== null && sources.every(({ curve }) => curve.steps.length === 0);
      if (sources === null || isEmpty.value) return;
      const state = board.state.peek();
      const view = { ...state, isLogX: isLog(state, "x", name), isLogY: isLog(state, "y", name) };
      const scene = buildScene(sources, board.marks.peek(), view);
      plot.paint(scene, { ...view, isSmoothed: view.smoothing > 0, highlight: board.highlight.peek(), palette, font });
      shown.current = { plot, scene, palette };
      painted.value += 1;
    };
    const request = (isLive: boolean): void => painter.request(plot, paint, isLive);
    const hide = feed.show(name, request);
    const stop = board.onChange(() => request(false));
    request(false);
    return () => {
      stop();
      hide();
      painter.forget(plot);
      plot.destroy();
      shown.current = null;
    };
  }, [name, board]);

  useSignalEffect(() => {
    painted.value; // a new picture needs its cursor, too
    shown.current?.plot.setCursor(board.cursor.value);
  });

  const columns = (): Column[] => (board.sources(name) ?? []).map(({ label, curve }) => ({ label, curve }));
  /** Every point where these are not too many, else finer buckets than the picture has. */
  const saveCsv = async (): Promise<void> => {
    try {
      saveText(toCsv(await board.readColumns(name)), `${name}.csv`, "text/csv");
    } catch (reason) {
      toast(asApiError(reason).message, "bad");
    }
  };
  const state = board.state.value;
  const isLarge = state.large === name;
  const savePng = (): void => {
    const { current } = shown;
    if (current?.plot.picture == null) return;
    const legend = current.scene.lines.map(({ source }) => ({ label: source.label, colour: source.colour }));
    saveCanvas(drawPicture(current.plot.picture, name, legend, current.palette, devicePixelRatio), `${name}.png`);
  };

  return (
    <>
      <header>
        <h3 class="ellipsis" title={name}>{name}</h3>
        <ReadOut isSpoken={hasFocus} board={board} scene={() => shown.current?.scene ?? null} painted={painted} />
        <Menu label={`Menu of ${name}`} isSmall items={[
          ...(["y", "x"] as const).map((axis) => ({
            label: `${isLog(state, axis, name) ? "Linear" : "Log"} ${axis} scale`, onSelect: () => board.flip(axis, name),
          })),
          { label: isLarge ? "Smaller" : "Larger", icon: "fit", onSelect: () => board.update({ large: isLarge ? "" : name }) },
          { label: "Show as table", icon: "columns", onSelect: () => setTable(columns()) },
          { label: "Save as PNG", icon: "download", onSelect: savePng },
          { label: "Save as CSV", icon: "download", onSelect: () => void saveCsv() },
        ]} />
      </header>
      <div class="plot" ref={root} tabIndex={0} role="group" aria-label={`Chart of ${name}`} aria-roledescription="chart"
        onFocus={() => setFocus(true)} onBlur={() => setFocus(false)}
        onKeyDown={(event) => handleKey(event, name, board, shown.current?.scene ?? null)}>
        {isEmpty.value && <p class="muted nothing">No points yet</p>}
      </div>
      {board.pick.value?.name === name && board.renderPick?.(board.pick.value.step)}
      {table !== null && <TableDialog name={name} columns={table} onSave={() => void saveCsv()} onClose={() => setTable(null)} />}
    </>
  );
}

/** The step of the curve's point nearest to a place of the axis. */
function stepAt(scene: Scene | null, x: number): number {
  const readings = scene === null ? [] : readAt(scene, x);
  return readings[0]?.step ?? Math.max(Math.round(x), 0);
}

/** The curve that the pointer is on, where there are several. */
function nearestRun(scene: Scene, x: number, height: number): string | null {
  if (scene.lines.length < 2) return null;
  const [low, high] = scene.y;
  const y = high - height * (high - low);
  let best: Reading | null = null;
  let distance = (high - low) * 0.08;
  for (const reading of readAt(scene, x)) {
    const own = Math.abs(reading.smoothed - y);
    if (own < distance) {
      best = reading;
      distance = own;
    }
  }
  return best?.line.source.runId ?? null;
}

function ReadOut({ isSpoken, board, scene, painted }: {
  isSpoken: boolean; board: Board; scene: () => Scene | null; painted: { value: number };
}) {
  const text = useComputed(() => {
    painted.value;
    const now = scene();
    if (now === null) return { place: "", values: [], notes: [] };
    const x = board.cursor.value;
    let readings = x === null ? readEnds(now) : readAt(now, x);
    const highlight = board.highlight.value;
    if (readings.length > MAX_READINGS) readings = readings.filter(({ line }) => line.source.runId === highlight);
    const isSmoothed = board.state.value.smoothing > 0;
    const place = x === null || readings[0] === undefined ? "" : formatPlace(board.state.value, readings[0]);
    const notes = [];
    if (now.numNonFinite > 0) notes.push(`${formatCount(now.numNonFinite)} NaN or infinite`);
    if (now.numHidden > 0) notes.push(`${formatPlural(now.numHidden, "value")} ≤ 0 not shown`);
    const marks = x === null ? [] : marksNear(now, x);
    return {
      place,
      notes: [...notes, ...marks],
      values: readings.map((reading) => ({
        colour: reading.line.source.colour,
        label: reading.line.source.label,
        text: formatNumber(isSmoothed ? reading.smoothed : reading.value),
        range: x === null ? "" : rangeOf(reading),
      })),
    };
  });
  const { place, values, notes } = text.value;
  const isOne = values.length === 1 && board.runs.value.length === 1;
  return (
    <span class="readout grow" aria-live={isSpoken ? "polite" : "off"}>
      {notes.map((note) => <span class="note" key={note}>{note}</span>)}
      {place !== "" && <span class="muted">{place}</span>}
      {values.map(({ colour, label, text: value, range }) => (
        <span key={label} title={label}>
          {!isOne && <i style={{ background: colour }} />}
          <b>{value}</b>{isOne && range !== "" && <span class="muted"> {range}</span>}
        </span>
      ))}
    </span>
  );
}

function rangeOf({ line, index }: Reading): string {
  const { curve } = line.source;
  if (curve.width <= 1 || curve.counts[index]! <= 1) return "";
  return `${formatNumber(curve.mins[index])} … ${formatNumber(curve.maxs[index])}`;
}

function formatPlace({ kind, xMetric }: ChartState, { step, x }: Reading): string {
  const at = `step ${formatCount(step)}`;
  if (kind === "epoch") return `${at}, epoch ${formatNumber(x)}`;
  if (kind === "metric") return `${at}, ${xMetric} ${formatNumber(x)}`;
  if (kind === "wall") return `${at}, ${formatTime(x * 1000)}`;
  return kind === "training" ? `${at}, ${formatSpan(x, 1)}` : at;
}

/** Texts of the marks at the cursor. */
function marksNear(scene: Scene, x: number): string[] {
  const reach = (scene.x[1] - scene.x[0]) / 120;
  const near = scene.marks.filter((placed) => Math.abs(placed.x - x) <= reach && placed.mark.kind !== "validation");
  return [...new Set(near.map(({ mark }) => mark.text))].slice(0, 2);
}

/** ← → move the cursor, + − zoom, Shift with ← → moves the picture, 0 resets, Enter picks. */
function handleKey(event: KeyboardEvent, name: string, board: Board, scene: Scene | null): void {
  if (scene === null || event.ctrlKey || event.metaKey || event.altKey) return;
  const [low, high] = scene.x;
  const at = board.cursor.peek() ?? (low + high) / 2;
  const minSpan = (scene.bounds[1] - scene.bounds[0]) / 1e6;
  const move = (part: number): void => {
    if (event.shiftKey) board.events.onZoom(board.state.peek().zoom === null ? null : pan(scene.x, scene.bounds, part * 10));
    else board.events.onCursor(Math.min(Math.max(at + (high - low) * part, low), high), null);
  };
  const zoom = (factor: number): void => board.events.onZoom(zoomAround(scene.x as Range, scene.bounds, at, factor, minSpan));
  const actions: Record<string, () => void> = {
    ArrowLeft: () => move(-0.01),
    ArrowRight: () => move(0.01),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    "0": () => board.events.onZoom(null),
    Enter: () => board.events.onPick(name, stepAt(scene, at)),
    Escape: () => board.clear(),
  };
  const action = actions[event.key];
  if (action === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  action();
}

function TableDialog({ name, columns, onSave, onClose }: {
  name: string; columns: readonly Column[]; onSave: () => void; onClose: () => void;
}) {
  const rows = alignRows(columns);
  const picked = pickRows(rows, MAX_ROWS);
  return (
    <Dialog title={name} isWide onClose={onClose}
      footer={<Button icon="download" onClick={onSave}>Save as CSV</Button>}>
      <p class="muted">
        {picked.length < rows.length
          ? `${formatCount(picked.length)} of ${formatPlural(rows.length, "point")}, evenly spread. The CSV file has more.`
          : formatPlural(rows.length, "point")}
      </p>
      <div class="scroll" tabIndex={0} role="group" aria-label={`Table of ${name}`}>
        <table class="table">
          <thead><tr><th class="number">step</th>{columns.map(({ label }) => <th class="number" key={label}>{label}</th>)}</tr></thead>
          <tbody>
            {picked.map((row) => (
              <tr key={row.step}>
                <td class="number">{formatCount(row.step)}</td>
                {row.values.map((value, i) => <td class="number" key={i}>{formatNumber(value, 6)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Dialog>
  );
}
