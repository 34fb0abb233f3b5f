/* Where charts get their curves: fetches only what is shown, in few requests, and adds live points.

   Per metric there is an overview of all steps and, while zoomed, a detail of the visible ones. Both have a fixed number
   of buckets. Metrics that are no longer shown are kept for a while and then forgotten. */

import type { TrainerEvent } from "../types";
import type { Range } from "./axis";
import { appendPoint, coarsen, type Curve, emptyCurve, readNumber } from "./curve";
import type { Discarded } from "./scene";

/** Of one metric, by run. */
export type CurveSet = Map<string, { curve: Curve; discarded: Discarded[] }>;

export interface Wanted {
  names: readonly string[];
  /** Both included; null: all. */
  steps: Range | null;
  maxPoints: number;
}

/** Fetches curves: by metric, then by run. */
export type Load = (wanted: Wanted, abort: AbortSignal) => Promise<Map<string, CurveSet>>;

interface LivePoint {
  runId: string;
  name: string;
  step: number;
  value: number;
  timeMs: number;
  attempt: number;
}

/** How a chart is told of a change. `isLive`: points were added to what it shows. */
export type Listener = (isLive: boolean) => void;

const MAX_NAMES = 12; // in one request
const MAX_KEPT = 40; // metrics that are not shown
const MAX_RECENT = 20_000;
const RECENT_MS = 5000; // longer than a request and the way of a point into the store
const REFETCH_MS = 400;

export class MetricFeed {
  private readonly shown = new Map<string, Set<Listener>>();
  private readonly overviews = new Map<string, CurveSet>();
  private details = new Map<string, CurveSet>();
  private zoomed: Range | null = null;
  private zoomAbort = new AbortController();
  private readonly abort = new AbortController();
  private readonly loading = new Set<string>();
  private readonly again = new Set<string>(); // what is loading may be another thing than is wanted now
  private queue = new Set<string>();
  private isQueued = false;
  private readonly stale = new Set<string>();
  private staleTimer: ReturnType<typeof setTimeout> | undefined;
  private readonly attempts = new Map<string, number>();
  private recent: { atMs: number; point: LivePoint }[] = [];

  constructor(
    private readonly load: Load,
    private readonly maxPoints: number,
    private readonly onError: (error: unknown) => void,
    private readonly nowMs: () => number = () => Date.now(),
  ) {}

  /** Ends all requests. */
  close(): void {
    this.abort.abort();
    this.zoomAbort.abort();
    clearTimeout(this.staleTimer);
    this.shown.clear();
  }

  /** A chart of this metric is on the screen. Returns how to say that it is not any more. */
  show(name: string, listener: Listener): () => void {
    const listeners = this.shown.get(name) ?? new Set();
    listeners.add(listener);
    this.shown.set(name, listeners);
    if (this.overviews.has(name)) this.touch(name);
    else this.want(name);
    if (this.zoomed !== null && !this.details.has(name)) void this.fetchDetail([name]);
    return () => {
      listeners.delete(listener);
      if (listeners.size > 0) return;
      this.shown.delete(name);
      this.details.delete(name);
      this.forgetOld();
    };
  }

  /** What to paint now: detail where it has come, else the overview; null: nothing has come yet. */
  curves(name: string): CurveSet | null {
    return this.details.get(name) ?? this.overviews.get(name) ?? null;
  }

  overview(name: string): CurveSet | null {
    return this.overviews.get(name) ?? null;
  }

  /** Some curve of a run, to find steps by time; null: nothing has come yet. */
  anyCurve(runId: string): Curve | null {
    for (const sets of this.overviews.values()) {
      const found = sets.get(runId)?.curve;
      if (found !== undefined && found.steps.length > 0) return found;
    }
    return null;
  }

  /** Fetches detail between two steps for what is shown; null: back to the overview. */
  zoom(steps: Range | null): void {
    if (steps?.[0] === this.zoomed?.[0] && steps?.[1] === this.zoomed?.[1]) return;
    this.zoomed = steps;
    this.zoomAbort.abort();
    this.zoomAbort = new AbortController();
    if (steps === null) {
      this.details = new Map();
      this.tellAll();
    } else {
      void this.fetchDetail([...this.shown.keys()]); // what was shown before stays until it comes
    }
  }

  /** A metric with up to so many points per curve, within the zoom; nothing is kept. */
  async read(name: string, maxPoints: number): Promise<CurveSet> {
    const found = await this.load({ names: [name], steps: this.zoomed, maxPoints }, this.abort.signal);
    return found.get(name) ?? new Map();
  }

  /** Everything that is shown is read again: the stream is live, or has missed something. */
  refetch(): void {
    for (const name of [...this.overviews.keys()]) if (!this.shown.has(name)) this.overviews.delete(name);
    for (const name of this.shown.keys()) this.wantAgain(name);
    if (this.zoomed !== null) void this.fetchDetail([...this.shown.keys()]);
  }

  /** Live events of a run. */
  take(runId: string, events: readonly TrainerEvent[]): void {
    const changed = new Set<string>();
    for (const event of events) {
      for (const [name, value] of readValues(event)) {
        if (!this.shown.has(name)) continue;
        const { attempt, timestamp_ms: timeMs } = event;
        const point = { runId, name, step: event.step ?? 0, value, timeMs, attempt };
        this.recent.push({ atMs: this.nowMs(), point });
        if (this.add(point)) changed.add(name);
      }
    }
    this.trimRecent();
    for (const name of changed) this.tell(name, true);
  }

  private add(point: LivePoint): boolean {
    const { runId, name, step, value, timeMs, attempt } = point;
    const key = `${runId}\n${name}`;
    const known = this.attempts.get(key) ?? attempt;
    this.attempts.set(key, Math.max(known, attempt));
    let isChanged = false;
    for (const [set, to] of [[this.overviews.get(name), Infinity], [this.details.get(name), this.zoomed?.[1] ?? 0]] as const) {
      if (set === undefined || step > to) continue;
      let own = set.get(runId);
      if (own === undefined) set.set(runId, (own = { curve: emptyCurve(name), discarded: [] }));
      if (attempt > known && step <= (own.curve.steps.at(-1) ?? -1)) {
        this.refetchSoon(name); // the model went back: earlier points are discarded
      } else if (appendPoint(own.curve, step, value, timeMs)) {
        if (own.curve.steps.length > 2 * this.maxPoints) coarsen(own.curve, this.maxPoints);
        isChanged = true;
      }
    }
    return isChanged;
  }

  private trimRecent(): void {
    const since = this.nowMs() - RECENT_MS;
    let drop = Math.max(this.recent.length - MAX_RECENT, 0);
    while (drop < this.recent.length && this.recent[drop]!.atMs < since) drop += 1;
    if (drop > 0) this.recent = this.recent.slice(drop);
  }

  /** Points that came while a request was on its way. */
  private addRecent(names: readonly string[]): void {
    this.trimRecent();
    const wanted = new Set(names);
    for (const { point } of this.recent) if (wanted.has(point.name)) this.add(point);
  }

  private refetchSoon(name: string): void {
    this.stale.add(name);
    this.staleTimer ??= setTimeout(() => {
      this.staleTimer = undefined;
      const names = [...this.stale].filter((one) => this.shown.has(one));
      this.stale.clear();
      for (const one of names) this.wantAgain(one);
      if (this.zoomed !== null) void this.fetchDetail(names);
    }, REFETCH_MS);
  }

  /** Also where it is loading: then once more after it. */
  private wantAgain(name: string): void {
    if (this.loading.has(name)) this.again.add(name);
    else this.want(name);
  }

  /** Requests made in one go are sent together. */
  private want(name: string): void {
    this.queue.add(name);
    if (this.isQueued) return;
    this.isQueued = true;
    queueMicrotask(() => {
      this.isQueued = false;
      const names = [...this.queue].filter((one) => !this.loading.has(one));
      this.queue = new Set();
      for (let i = 0; i < names.length; i += MAX_NAMES) void this.fetchOverview(names.slice(i, i + MAX_NAMES));
    });
  }

  private async fetchOverview(names: readonly string[]): Promise<void> {
    for (const name of names) this.loading.add(name);
    try {
      const found = await this.load({ names, steps: null, maxPoints: this.maxPoints }, this.abort.signal);
      for (const name of names) this.overviews.set(name, found.get(name) ?? new Map());
      this.addRecent(names);
    } catch (error) {
      this.fail(error);
      return;
    } finally {
      for (const name of names) {
        this.loading.delete(name);
        if (this.again.delete(name) && this.shown.has(name)) this.want(name);
      }
    }
    this.forgetOld();
    for (const name of names) this.tell(name, false);
  }

  private async fetchDetail(names: readonly string[]): Promise<void> {
    const { zoomed: steps, zoomAbort } = this;
    for (let i = 0; i < names.length; i += MAX_NAMES) {
      const part = names.slice(i, i + MAX_NAMES);
      try {
        const found = await this.load({ names: part, steps, maxPoints: this.maxPoints }, zoomAbort.signal);
        if (this.zoomAbort !== zoomAbort) return;
        for (const name of part) this.details.set(name, found.get(name) ?? new Map());
        this.addRecent(part);
      } catch (error) {
        this.fail(error);
        return;
      }
      for (const name of part) this.tell(name, false);
    }
  }

  private fail(error: unknown): void {
    if (!(error instanceof DOMException && error.name === "AbortError")) this.onError(error);
  }

  private tell(name: string, isLive: boolean): void {
    for (const listener of this.shown.get(name) ?? []) listener(isLive);
  }

  private tellAll(): void {
    for (const name of this.shown.keys()) this.tell(name, false);
  }

  private touch(name: string): void {
    const kept = this.overviews.get(name)!;
    this.overviews.delete(name);
    this.overviews.set(name, kept);
    this.want(name); // it got no live points while it was hidden
  }

  private forgetOld(): void {
    const hidden = [...this.overviews.keys()].filter((name) => !this.shown.has(name));
    for (const name of hidden.slice(0, Math.max(hidden.length - MAX_KEPT, 0))) this.overviews.delete(name);
  }
}

/** Names and values of the metrics in an event. */
export function readValues(event: TrainerEvent): [string, number][] {
  if (event.event === "metric") return [[String(event["name"]), readNumber(event["value"] as number | string)]];
  if (event.event !== "metrics" && event.event !== "validation") return [];
  return Object.entries((event["values"] ?? {}) as Record<string, number | string>)
    .map(([name, value]) => [name, readNumber(value)]);
}
