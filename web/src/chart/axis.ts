/* The x axis: what a point"s place is, ranges, zooming, and what a log scale can show. */

import { indexBefore, type Curve } from "./curve";

export type XKind = "step" | "epoch" | "wall" | "training" | "metric";
/** Those that need no choice of a metric. */
export const X_KINDS: readonly XKind[] = ["step", "epoch", "wall", "training"];
export const X_LABELS: Record<XKind, string> = {
  step: "step",
  epoch: "epoch",
  wall: "wall time",
  training: "training time",
  metric: "metric",
};

export type Range = readonly [number, number];

/** When an attempt ran; `endedMs` null: it still runs. */
export interface AttemptSpan {
  launchedMs: number;
  endedMs: number | null;
}

/** What is needed of a run to place its points. */
export interface RunClock {
  stepsPerEpoch: number | null;
  attempts: readonly AttemptSpan[];
  /** The run's curve of the metric that is the x axis; null or missing: it has none. */
  ruler?: Curve | null;
}

/** Milliseconds in which attempts ran, up to a time: waits between attempts do not count. */
export function trainingMs(timeMs: number, attempts: readonly AttemptSpan[]): number {
  let total = 0;
  for (const { launchedMs, endedMs } of attempts) {
    const end = endedMs === null ? timeMs : Math.min(timeMs, endedMs);
    if (end > launchedMs) total += end - launchedMs;
  }
  return total;
}

/** Which kinds of x axis these runs can have. */
export function possibleKinds(clocks: readonly RunClock[]): XKind[] {
  return X_KINDS.filter((kind) => kind !== "epoch" || clocks.every((clock) => (clock.stepsPerEpoch ?? 0) > 0));
}

/** The value of the x axis's metric at a step, between its points; NaN: there are none around it. */
function readRuler(ruler: Curve | null | undefined, step: number): number {
  if (!ruler) return NaN;
  const { steps, values } = ruler;
  const before = indexBefore(steps, step);
  if (before < 0 || steps[before] === step) return values[before] ?? NaN;
  const after = before + 1;
  if (after >= steps.length) return NaN;
  const part = (step - steps[before]!) / (steps[after]! - steps[before]!);
  return values[before]! + (values[after]! - values[before]!) * part;
}

/** A curve and the places of its buckets, ascending. On the axis of a metric its buckets are in the order of that metric,
    and those without a value of it are left out. */
export function placeCurve(curve: Curve, kind: XKind, clock: RunClock): { curve: Curve; xs: Float64Array } {
  if (kind !== "metric") return { curve, xs: placePoints(curve, kind, clock) };
  const places = curve.steps.map((step) => readRuler(clock.ruler, step));
  const order = places.flatMap((x, i) => (Number.isFinite(x) ? [i] : [])).sort((a, b) => places[a]! - places[b]! || a - b);
  const pick = (column: readonly number[]): number[] => order.map((i) => column[i]!);
  const { steps, values, mins, maxs, counts, timesMs } = curve;
  const sorted = {
    ...curve, steps: pick(steps), values: pick(values), mins: pick(mins), maxs: pick(maxs), counts: pick(counts), timesMs: pick(timesMs),
  };
  return { curve: sorted, xs: Float64Array.from(pick(places)) };
}

/** The place of each bucket on an axis of steps or time, ascending. Times are in seconds. */
export function placePoints(curve: Pick<Curve, "steps" | "timesMs">, kind: Exclude<XKind, "metric">, clock: RunClock): Float64Array {
  const places = new Float64Array(curve.steps.length);
  const perEpoch = clock.stepsPerEpoch || 1;
  let previous = -Infinity;
  for (let i = 0; i < places.length; i++) {
    let x: number;
    if (kind === "step") x = curve.steps[i]!;
    else if (kind === "epoch") x = curve.steps[i]! / perEpoch;
    else if (kind === "wall") x = curve.timesMs[i]! / 1000;
    else x = trainingMs(curve.timesMs[i]!, clock.attempts) / 1000;
    previous = x < previous ? previous : x; // a clock that was set back must not fold the curve
    places[i] = previous;
  }
  return places;
}

/** The place of a step on the axis, between the points around it; null: not known. */
export function placeStep(
  step: number,
  timeMs: number | null,
  kind: XKind,
  clock: RunClock,
  curve: Curve | null,
): number | null {
  if (kind === "step") return step;
  if (kind === "epoch") return clock.stepsPerEpoch ? step / clock.stepsPerEpoch : null;
  if (kind === "metric") {
    const x = readRuler(clock.ruler, step);
    return Number.isFinite(x) ? x : null;
  }
  let at = timeMs;
  if (!at && curve?.steps.length) at = curve.timesMs[Math.max(indexBefore(curve.steps, step), 0)]!;
  if (!at) return null;
  return (kind === "wall" ? at : trainingMs(at, clock.attempts)) / 1000;
}

/** The steps between two places of the axis, with one bucket to spare on both sides; null: all of them. */
export function stepsBetween(range: Range, kind: XKind, clock: RunClock, curve: Curve | null): Range | null {
  const [low, high] = range;
  if (kind === "step") return [Math.max(Math.floor(low), 0), Math.ceil(high)];
  if (kind === "epoch") {
    const perEpoch = clock.stepsPerEpoch || 1;
    return [Math.max(Math.floor(low * perEpoch), 0), Math.ceil(high * perEpoch)];
  }
  if (kind === "metric") {
    const { ruler } = clock;
    const within = (ruler?.steps ?? []).filter((_, i) => ruler!.values[i]! >= low && ruler!.values[i]! <= high);
    const around = ruler?.width ?? 0;
    return within.length === 0 ? null : [Math.max(within[0]! - around, 0), within[within.length - 1]! + around];
  }
  if (!curve?.steps.length) return null;
  const xs = placePoints(curve, kind, clock);
  const first = Math.max(indexBefore(xs, low), 0);
  const last = Math.min(indexBefore(xs, high) + 1, xs.length - 1);
  return [Math.max(curve.steps[first]! - curve.width, 0), curve.steps[last]!];
}

/** The range that holds all of them; null: there is nothing. */
export function joinRanges(ranges: Iterable<Range | null>): Range | null {
  let low = Infinity;
  let high = -Infinity;
  for (const range of ranges) {
    if (range === null) continue;
    low = Math.min(low, range[0]);
    high = Math.max(high, range[1]);
  }
  return low <= high ? [low, high] : null;
}

/** Zoom by a factor (below 1: in) around a place; within `bounds` and never below `minSpan`. */
export function zoomAround(range: Range, bounds: Range, at: number, factor: number, minSpan: number): Range | null {
  const span = Math.max((range[1] - range[0]) * factor, minSpan);
  if (span >= bounds[1] - bounds[0]) return null;
  const part = range[1] > range[0] ? (at - range[0]) / (range[1] - range[0]) : 0.5;
  return shiftInto([at - part * span, at - part * span + span], bounds);
}

/** Move by a part of the range"s own width, within the bounds. */
export function pan(range: Range, bounds: Range, part: number): Range {
  const by = (range[1] - range[0]) * part;
  return shiftInto([range[0] + by, range[1] + by], bounds);
}

function shiftInto([low, high]: Range, bounds: Range): Range {
  const span = high - low;
  if (low < bounds[0]) return [bounds[0], Math.min(bounds[0] + span, bounds[1])];
  if (high > bounds[1]) return [Math.max(bounds[1] - span, bounds[0]), bounds[1]];
  return [low, high];
}

/** A range that a linear scale can show: with some room, never empty. */
export function padLinear(range: Range | null): Range {
  if (range === null) return [0, 1];
  const [low, high] = range;
  if (low === high) {
    const room = Math.abs(low) * 0.1 || 1;
    return [low - room, high + room];
  }
  const room = (high - low) * 0.04;
  return [low - room, high + room];
}

/** A range that a log scale can show: above zero, never empty. `smallest`: the smallest value above zero that there is. */
export function padLog(range: Range | null, smallest: number): Range {
  if (range === null || !(range[1] > 0)) return [0.1, 10];
  const high = range[1];
  const low = range[0] > 0 ? range[0] : Math.min(Number.isFinite(smallest) ? smallest : high / 1000, high);
  if (low === high) return [low / 2, high * 2];
  const room = Math.pow(high / low, 0.04);
  return [low / room, high * room];
}

/** The min and max of finite values between two indexes, and the smallest above zero. */
export function extent(values: ArrayLike<number>, from: number, to: number): { range: Range | null; smallest: number } {
  let low = Infinity;
  let high = -Infinity;
  let smallest = Infinity;
  for (let i = Math.max(from, 0); i <= to && i < values.length; i++) {
    const value = values[i]!;
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
    if (value > 0 && value < smallest) smallest = value;
  }
  return { range: low <= high ? [low, high] : null, smallest };
}
