/* What is known of one run while its page is open: details, marks on the axis, speed; kept live by the stream. */

import { computed, type ReadonlySignal, signal } from "@preact/signals";

import { api, type ApiError } from "../api";
import type { RunClock } from "../chart/axis";
import { readSeries } from "../chart/curve";
import { type CurveSet, MetricFeed } from "../chart/feed";
import type { Mark } from "../chart/scene";
import { findStepsPerEpoch, readStepsPerEpoch } from "../chart/run_clocks";
import { asApiError, putRun, runs, stream } from "../store";
import { isTerminal, type LineagePart, type Marker, type Run, type RunDetails, type TrainerEvent } from "../types";

const SOON_MS = 500;
const SPEED_MS = 30_000; // the time that the speed is measured over
const MAX_PLACES = 2000;
const MAX_POINTS = 640; // about the width of a chart; live points may double it
/** After these events the details and the marks are read again. */
const MARKING = new Set(["started", "checkpoint", "validation", "completed", "failed", "ready", "promoted", "promotion_refused"]);
const FILING = new Set(["checkpoint", "sample", "video", "artifact"]);

export class RunModel {
  readonly details = signal<RunDetails | null>(null);
  readonly error = signal<ApiError | null>(null);
  readonly marks = signal<readonly Mark[]>([]);
  /** The runs whose points the curves have with parents, the oldest first, without this one. */
  readonly ancestors = signal<readonly LineagePart[]>([]);
  /** On the parts of the curves that are theirs. */
  readonly ancestorMarks = signal<readonly Mark[]>([]);
  readonly stepsPerEpoch = signal<number | null>(null);
  /** Steps per second, of the last half minute. */
  readonly speed = signal<number | null>(null);
  /** Grows when there are new files. */
  readonly filesVersion = signal(0);
  readonly run: ReadonlySignal<Run | null>;
  readonly clock: ReadonlySignal<RunClock>;
  readonly names: ReadonlySignal<readonly string[]>;
  withParents = false;
  private feeds = new Set<MetricFeed>();
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly abort = new AbortController();
  private places: { timeMs: number; step: number }[] = [];
  private measuredMs = 0;

  constructor(readonly runId: string) {
    this.run = computed(() => {
      const live = runs.value.get(runId);
      const read = this.details.value?.run ?? null;
      if (live === undefined || read === null) return read ?? live ?? null;
      return live.change >= read.change ? { ...read, ...live, config: read.config } : read;
    });
    this.clock = computed(() => ({
      stepsPerEpoch: this.stepsPerEpoch.value,
      attempts: (this.details.value?.attempts ?? []).map((one) => ({ launchedMs: one.launched_ms, endedMs: one.ended_ms })),
    }));
    const names = computed(() => Object.keys(this.run.value?.metrics ?? {}).sort().join("\n"));
    this.names = computed(() => names.value.split("\n").filter((name) => name !== "")); // the same list until a name is new
  }

  /** Reads and follows. Returns how to end it. */
  start(): () => void {
    let stopStream: (() => void) | null = null;
    void this.read().then(() => {
      const run = this.details.peek()?.run;
      if (run !== undefined) void this.readEpoch();
      const isMissing = this.error.peek()?.status === 404; // the stream refuses a run that is not there
      if (this.abort.signal.aborted || isMissing || (run !== undefined && isTerminal(run))) return;
      stopStream = stream.subscribe({
        topic: { kind: "events", runId: this.runId },
        onSync: () => {
          void this.read();
          for (const feed of this.feeds) feed.refetch();
        },
        onMessage: (message) => {
          if (message.kind === "events") this.take(message.data.events);
        },
      });
    });
    let state = "";
    const stopRun = this.run.subscribe((run) => {
      const now = run === null ? "" : `${run.state} ${run.attempt}`;
      if (state !== "" && now !== state) this.readSoon();
      state = now;
    });
    return () => {
      this.abort.abort();
      clearTimeout(this.timer);
      stopRun();
      stopStream?.();
    };
  }

  makeFeed(onError: (error: unknown) => void): MetricFeed {
    const feed: MetricFeed = new MetricFeed(async ({ names, steps, maxPoints }, abort) => {
      const { withParents } = this; // as it is asked for, whatever it is when the answer comes
      const found = await api.getMetrics(this.runId, {
        name: names,
        from_step: steps?.[0],
        to_step: steps?.[1],
        max_points: maxPoints,
        with_ancestors: withParents,
        with_discarded: true,
      }, abort);
      if (withParents) void this.readAncestors(found.lineage.slice(0, -1));
      const sets = new Map<string, CurveSet>();
      for (const series of found.series) {
        const discarded = found.discarded
          .filter(({ name }) => name === series.name)
          .map((one) => ({ attempt: one.attempt, curve: readSeries({ ...one, mins: [], maxs: [], counts: [], width: 1 }) }));
        sets.set(series.name, new Map([[this.runId, { curve: readSeries(series), discarded }]]));
      }
      return sets;
    }, MAX_POINTS, onError);
    this.feeds.add(feed);
    this.abort.signal.addEventListener("abort", () => this.feeds.delete(feed));
    return feed;
  }

  async read(): Promise<void> {
    try {
      const details = await api.getRun(this.runId, this.abort.signal);
      this.details.value = details;
      this.error.value = null;
      putRun(details.run);
    } catch (reason) {
      if (!this.abort.signal.aborted) this.error.value = asApiError(reason);
      return;
    }
    try {
      const { markers } = await api.getMarkers(this.runId, this.abort.signal);
      this.marks.value = readMarks(markers, this.details.value.run);
    } catch {
      // curves are shown without marks
    }
  }

  /** They have ended, so that their marks stay as they are. */
  private async readAncestors(parts: readonly LineagePart[]): Promise<void> {
    if (JSON.stringify(parts) === JSON.stringify(this.ancestors.peek())) return;
    this.ancestors.value = parts;
    try {
      const found = await Promise.all(parts.map(async (part) => markPart(part, (await api.getMarkers(part.run_id, this.abort.signal)).markers)));
      if (this.ancestors.peek() === parts) this.ancestorMarks.value = found.flat();
    } catch {
      if (this.ancestors.peek() === parts) this.ancestors.value = []; // the next request reads them
    }
  }

  private async readEpoch(): Promise<void> {
    const found = await readStepsPerEpoch(this.runId, this.abort.signal);
    this.stepsPerEpoch.value ??= found;
  }

  private take(events: readonly TrainerEvent[]): void {
    for (const feed of this.feeds) feed.take(this.runId, events);
    this.stepsPerEpoch.value ??= findStepsPerEpoch(events);
    const last = events.findLast(({ step }) => step !== undefined);
    if (last?.step !== undefined) this.places.push({ timeMs: last.timestamp_ms, step: last.step });
    this.measure();
    if (events.some(({ event }) => MARKING.has(event))) this.readSoon();
    if (events.some(({ event }) => FILING.has(event))) this.filesVersion.value += 1;
  }

  /** Once a second: a text that changes with every event would have the page laid out again each time. */
  private measure(): void {
    const last = this.places.at(-1);
    if (last === undefined || last.timeMs - this.measuredMs < 1000) return;
    this.measuredMs = last.timeMs;
    this.places = this.places.filter(({ timeMs }) => timeMs >= last.timeMs - SPEED_MS).slice(-MAX_PLACES);
    const from = this.places.find(({ step }) => step <= last.step);
    if (from === undefined || last.timeMs - from.timeMs < 1000) return;
    this.speed.value = ((last.step - from.step) * 1000) / (last.timeMs - from.timeMs);
  }

  private readSoon(): void {
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      void this.read();
    }, SOON_MS);
  }
}

/** Those that are on the part of a curve that is this run's. Its best step and its end are its own, not the line's. */
export const markPart = (part: LineagePart, markers: readonly Marker[]): Mark[] =>
  readMarks(markers.filter(({ kind, step }) => kind !== "best" && kind !== "end" && step >= part.from_step && step <= (part.to_step ?? Infinity)), { state: "COMPLETED" });

/** The end of a run is a mark only where it is a failure: a curve that stops says the rest. */
export function readMarks(markers: readonly Marker[], run: Pick<Run, "state">): Mark[] {
  return markers
    .filter(({ kind }) => kind !== "end" || run.state === "FAILED")
    .map((marker) => ({
      kind: marker.kind === "end" ? "failure" : marker.kind === "checkpoint" && marker.artifact_id === "" ? "removed" : marker.kind, step: marker.step, timeMs: marker.time_ms || null, text: marker.text || marker.kind,
    }));
}
