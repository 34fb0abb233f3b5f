/* All charts of a view: what they share (axis, zoom, cursor, highlight), the tools above them, and the groups. */

import { computed, type ReadonlySignal, signal, type Signal } from "@preact/signals";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo } from "preact/hooks";

import { query, setQuery } from "../router";
import { colourVersion } from "../theme";
import { Button, Segmented } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Empty } from "../ui/notice";
import { joinRanges, possibleKinds, type Range, type RunClock, stepsBetween, X_LABELS } from "./axis";
import { Chart } from "./chart";
import { canvasColour } from "./colours";
import type { Column } from "./csv";
import type { CurveSet, MetricFeed } from "./feed";
import type { Mark, Source } from "./scene";
import { type ChartState, groupMetrics, MAX_SMOOTHING, readState, withoutFlips, writeState } from "./view_state";

export interface BoardRun {
  runId: string;
  label: string;
  /** Of its colour. */
  index: number;
  clock: RunClock;
}

export interface Pick {
  name: string;
  step: number;
}

const MAX_SAVED = 400_000; // points of a file, of all curves
const WRITE_MS = 250; // browsers limit how often an address may change

/** What the charts of one view share. */
export class Board {
  readonly state: Signal<ChartState>;
  readonly cursor = signal<number | null>(null);
  readonly highlight = signal<string | null>(null);
  readonly pick = signal<Pick | null>(null);
  readonly marks = signal<readonly Mark[]>([]);
  readonly runs = signal<readonly BoardRun[]>([]);
  /** Runs that are not drawn. */
  readonly hidden = signal<ReadonlySet<string>>(new Set());
  /** What a step is: of a server they are seconds. */
  stepLabel = X_LABELS.step;
  /** Shown below a chart at which a point was picked. */
  renderPick: ((step: number) => VNode) | null = null;

  private written: string;
  private unwritten: Partial<ChartState> = {};
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly colours: ReadonlySignal<ReadonlyMap<string, string>>;
  /** Grows when the curves of the metric that is the x axis were read. */
  readonly rulers = signal(0);

  constructor(readonly feed: MetricFeed) {
    this.written = query.peek().toString();
    this.state = signal(readState(query.peek()));
    this.colours = computed(() => {
      colourVersion.value;
      return new Map(this.runs.value.map(({ runId, index }) => [runId, canvasColour(index)]));
    });
  }

  readonly events = {
    onZoom: (zoom: Range | null): void => this.update({ zoom }),
    onCursor: (x: number | null, runId: string | null): void => {
      this.cursor.value = x;
      if (runId !== null || x === null) this.highlight.value = runId;
    },
    onPick: (name: string, step: number): void => {
      if (this.renderPick !== null) this.pick.value = { name, step };
    },
  };

  clear(): void {
    this.cursor.value = null;
    this.pick.value = null;
  }

  /** Shown at once, and soon after in the address. */
  update(change: Partial<ChartState>): void {
    this.state.value = { ...this.state.peek(), ...change };
    this.unwritten = { ...this.unwritten, ...change };
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), WRITE_MS);
  }

  /** Changes the scale of one chart. */
  flip(axis: "x" | "y", name: string): void {
    const { flipped } = this.state.peek();
    const key = `${axis} ${name}`;
    this.update({ flipped: flipped.includes(key) ? flipped.filter((one) => one !== key) : [...flipped, key] });
  }

  /** The address changed: by us, or by the way back. */
  read(now: URLSearchParams): void {
    if (now.toString() === this.written) return;
    this.written = now.toString();
    this.state.value = { ...readState(now), ...this.unwritten };
  }

  private write(): void {
    const change = writeState(this.unwritten);
    this.unwritten = {};
    setQuery(change);
    this.written = query.peek().toString();
  }

  close(): void {
    clearTimeout(this.timer); // another view has another address
    this.feed.close();
  }

  /** Keeps the curves of the metric that is the x axis, if one is. Returns how to end that. */
  followRuler(): () => void {
    let hide = (): void => undefined;
    const stop = computed(() => this.state.value.xMetric).subscribe((name) => {
      hide();
      // Live points of it need no repaint of their own: those of the charts are read with them.
      hide = name === "" ? () => undefined : this.feed.show(name, (isLive) => { if (!isLive) this.rulers.value += 1; });
    });
    return () => {
      stop();
      hide();
    };
  }

  /** What places a run's points, with these curves of the x axis's metric. */
  private withRuler(clock: RunClock, runId: string, rulers: CurveSet | null): RunClock {
    return this.state.peek().kind === "metric" ? { ...clock, ruler: rulers?.get(runId)?.curve ?? null } : clock;
  }

  /** The curves of a metric; null: not known yet. */
  sources(name: string): Source[] | null {
    const sets = this.feed.curves(name);
    if (sets === null) return null;
    const overviews = this.feed.overview(name);
    const colours = this.colours.peek();
    const hidden = this.hidden.peek();
    const { xMetric } = this.state.peek();
    const [rulers, rulerOverviews] = [this.feed.curves(xMetric), this.feed.overview(xMetric)];
    return this.runs.peek().flatMap(({ runId, label, clock: own }): Source[] => {
      const found = sets.get(runId);
      if (found === undefined || hidden.has(runId)) return [];
      return [{
        runId, label, colour: colours.get(runId) ?? "gray", curve: found.curve, discarded: found.discarded,
        overview: overviews?.get(runId)?.curve ?? found.curve,
        clock: this.withRuler(own, runId, rulers), overviewClock: this.withRuler(own, runId, rulerOverviews),
      }];
    });
  }

  /** The curves of a metric with as many points as are sent at once, for a file. */
  async readColumns(name: string): Promise<Column[]> {
    const found = await this.feed.read(name, Math.floor(MAX_SAVED / Math.max(this.runs.peek().length, 1)));
    return this.runs.peek().flatMap(({ runId, label }) => {
      const own = found.get(runId);
      return own === undefined || this.hidden.peek().has(runId) ? [] : [{ label, curve: own.curve }];
    });
  }

  /** Calls back when something changes that all charts show. */
  onChange(callback: () => void): () => void {
    let isFirst = true;
    return computed(() => [this.state.value, this.highlight.value, this.marks.value, this.runs.value, this.hidden.value, this.colours.value, this.rulers.value])
      .subscribe(() => {
        if (!isFirst) callback();
        isFirst = false;
      });
  }

  /** Asks for detail of what is zoomed in to. */
  fetchZoom(): void {
    const { zoom, kind, xMetric } = this.state.peek();
    if (zoom === null) {
      this.feed.zoom(null);
      return;
    }
    const steps = joinRanges(
      this.runs.peek().map(({ runId, clock }) =>
        stepsBetween(zoom, kind, this.withRuler(clock, runId, this.feed.overview(xMetric)), this.feed.anyCurve(runId))),
    );
    if (steps === null) return;
    const room = Math.ceil((steps[1] - steps[0]) * 0.02) + 1; // lines run out of the picture
    this.feed.zoom([Math.max(steps[0] - room, 0), steps[1] + room]);
  }
}

/** A board that lives as long as the view that shows it. */
export function useBoard(makeFeed: () => MetricFeed, key: string): Board {
  const board = useMemo(() => new Board(makeFeed()), [key]);
  useEffect(() => {
    const stopReading = query.subscribe((now) => board.read(now));
    const stopRuler = board.followRuler();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const stopZoom = computed(() => [board.state.value.zoom, board.state.value.kind, board.runs.value, board.rulers.value]).subscribe(() => {
      clearTimeout(timer);
      timer = setTimeout(() => board.fetchZoom(), 60);
    });
    return () => {
      stopReading();
      stopRuler();
      stopZoom();
      clearTimeout(timer);
      board.close();
    };
  }, [board]);
  return board;
}

export function Charts({ board, names, hasEnded = false, children }: {
  board: Board; names: readonly string[]; hasEnded?: boolean; children?: ComponentChildren;
}) {
  const state = board.state.value;
  const groups = groupMetrics(names, state.search);
  if (names.length === 0) {
    return hasEnded
      ? <Empty title="No metrics"><p>It ended before a value was reported.</p></Empty>
      : <Empty title="No metrics yet"><p>Charts appear with the first values that are reported.</p></Empty>;
  }
  return (
    <div class="board">
      <Tools board={board} names={names}>{children}</Tools>
      {groups.length === 0 && <Empty title={`No metric matches “${state.search}”`} />}
      {groups.map(({ prefix, names: own }) => {
        const isFolded = state.hidden.includes(prefix);
        return (
          <section key={prefix} aria-label={prefix || "metrics"}>
            {groups.length === 1 ? <h2 class="visually-hidden">{prefix || "metrics"}</h2> : (
              <h2 class="group">
                <button type="button" aria-expanded={!isFolded}
                  onClick={() => board.update({ hidden: isFolded ? state.hidden.filter((one) => one !== prefix) : [...state.hidden, prefix] })}>
                  <Icon name={isFolded ? "right" : "down"} /> {prefix || "other"} <span class="muted">{own.length}</span>
                </button>
              </h2>
            )}
            {!isFolded && <div class="charts">{own.map((name) => <Chart key={name} name={name} board={board} />)}</div>}
          </section>
        );
      })}
    </div>
  );
}

function Tools({ board, names, children }: { board: Board; names: readonly string[]; children?: ComponentChildren }) {
  const state = board.state.value;
  // When the attempts of parents ran is not known here.
  const kinds = possibleKinds(board.runs.value.map(({ clock }) => clock)).filter((kind) => kind !== "training" || !state.withParents);
  return (
    <div class="tools" role="toolbar" aria-label="Charts">
      {names.length > 4 && (
        <input class="input search" type="search" placeholder="Find metrics" aria-label="Find metrics" value={state.search}
          onInput={(event) => board.update({ search: event.currentTarget.value })} />
      )}
      <Segmented label="x axis" value={state.kind} options={kinds.map((kind) => ({ value: kind, label: kind === "step" ? board.stepLabel : X_LABELS[kind] }))}
        onChange={(kind) => board.update({ kind, xMetric: "", zoom: null })} />
      {(names.length > 1 || state.xMetric !== "") && (
        <select class="input by-metric" aria-label="Metric as x axis" value={state.xMetric}
          onChange={({ currentTarget: { value } }) => board.update({ kind: value === "" ? "step" : "metric", xMetric: value, zoom: null })}>
          <option value="">by a metric…</option>
          {[...new Set([...names, ...(state.xMetric === "" ? [] : [state.xMetric])])].sort().map((name) => <option key={name} value={name}>{name}</option>)}
        </select>
      )}
      <label class="check"><input type="checkbox" checked={state.isLogX}
        onChange={(event) => board.update({ isLogX: event.currentTarget.checked, flipped: withoutFlips(state, "x") })} /> log x</label>
      <label class="check"><input type="checkbox" checked={state.isLogY}
        onChange={(event) => board.update({ isLogY: event.currentTarget.checked, flipped: withoutFlips(state, "y") })} /> log y</label>
      <label class="check smoothing">Smoothing
        <input type="range" min="0" max={MAX_SMOOTHING} step="0.01" value={state.smoothing}
          onInput={(event) => board.update({ smoothing: Number(event.currentTarget.value) })} />
        <output>{state.smoothing.toFixed(2)}</output></label>
      {children}
      {state.zoom !== null && <Button isSmall icon="fit" onClick={() => board.update({ zoom: null })}>Reset zoom</Button>}
    </div>
  );
}
