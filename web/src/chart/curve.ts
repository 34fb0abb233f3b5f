/* Points of one metric as the gateway sends them: raw (width 1) or in buckets of `width` steps, anchored at step 0.
   Live points are merged into the newest bucket. Once there are too many buckets the width doubles, so that memory and
   painting cost stay the same for a run of any length. */

import type { Num, Series } from "../types";

export interface Curve {
  name: string;
  /** Steps of a bucket; 1: raw points. A power of two. */
  width: number;
  /** The last step of each bucket, ascending. */
  steps: number[];
  /** The last value of each bucket; may be NaN or infinite. */
  values: number[];
  mins: number[];
  maxs: number[];
  counts: number[];
  timesMs: number[];
  /** Points that the curve stands for. */
  numPoints: number;
}

/** A value of the API or of an event: JSON has no NaN and no infinity, so these are words, and events have shorter ones. */
export function readNumber(value: Num | string | null | undefined): number {
  if (typeof value === "number") return value;
  if (value === null || value === undefined) return NaN;
  if (value === "inf") return Infinity;
  return value === "-inf" ? -Infinity : Number(value);
}

export function emptyCurve(name: string, width = 1): Curve {
  return { name, width, steps: [], values: [], mins: [], maxs: [], counts: [], timesMs: [], numPoints: 0 };
}

export function readSeries(wire: Series): Curve {
  const values = wire.values.map(readNumber);
  const isRaw = wire.mins.length === 0;
  return {
    name: wire.name,
    width: Math.max(wire.width ?? 1, 1),
    steps: wire.steps,
    values,
    mins: isRaw ? values.slice() : wire.mins.map(readNumber),
    maxs: isRaw ? values.slice() : wire.maxs.map(readNumber),
    counts: wire.counts?.length > 0 ? wire.counts : values.map(() => 1),
    timesMs: wire.timestamps_ms,
    numPoints: wire.num_points,
  };
}

/** Add a live point. Points at or before the newest step are known already. Returns whether anything changed. */
export function appendPoint(curve: Curve, step: number, value: number, timeMs: number): boolean {
  const last = curve.steps.length - 1;
  if (last >= 0 && step <= curve.steps[last]!) return false;
  curve.numPoints += 1;
  if (last >= 0 && bucketOf(step, curve.width) === bucketOf(curve.steps[last]!, curve.width)) {
    curve.steps[last] = step;
    curve.values[last] = value;
    curve.mins[last] = smaller(curve.mins[last]!, value);
    curve.maxs[last] = larger(curve.maxs[last]!, value);
    curve.counts[last]! += 1;
    curve.timesMs[last] = timeMs;
    return true;
  }
  curve.steps.push(step);
  curve.values.push(value);
  curve.mins.push(value);
  curve.maxs.push(value);
  curve.counts.push(1);
  curve.timesMs.push(timeMs);
  return true;
}

/** Double the width until there are at most `maxBuckets`. Merges as the gateway does: min, max, last, count. */
export function coarsen(curve: Curve, maxBuckets: number): void {
  while (curve.steps.length > Math.max(maxBuckets, 1)) {
    const width = curve.width * 2;
    let to = -1;
    for (let from = 0; from < curve.steps.length; from++) {
      const step = curve.steps[from]!;
      if (to >= 0 && bucketOf(step, width) === bucketOf(curve.steps[to]!, width)) {
        curve.mins[to] = smaller(curve.mins[to]!, curve.mins[from]!);
        curve.maxs[to] = larger(curve.maxs[to]!, curve.maxs[from]!);
        curve.counts[to]! += curve.counts[from]!;
      } else {
        to += 1;
        curve.mins[to] = curve.mins[from]!;
        curve.maxs[to] = curve.maxs[from]!;
        curve.counts[to] = curve.counts[from]!;
      }
      curve.steps[to] = step;
      curve.values[to] = curve.values[from]!;
      curve.timesMs[to] = curve.timesMs[from]!;
    }
    for (const column of [curve.steps, curve.values, curve.mins, curve.maxs, curve.counts, curve.timesMs]) {
      column.length = to + 1;
    }
    curve.width = width;
  }
}

/** Index of the bucket with the newest step at or before `x` in an ascending list; -1: none. */
export function indexBefore(xs: ArrayLike<number>, x: number): number {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle]! <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Index of the nearest entry of an ascending list; -1: the list is empty. */
export function indexNearest(xs: ArrayLike<number>, x: number): number {
  const before = indexBefore(xs, x);
  if (before < 0) return xs.length ? 0 : -1;
  if (before + 1 >= xs.length) return before;
  return x - xs[before]! <= xs[before + 1]! - x ? before : before + 1;
}

export function countNonFinite(curve: Curve): number {
  let count = 0;
  for (const value of curve.values) if (!Number.isFinite(value)) count += 1;
  return count;
}

function bucketOf(step: number, width: number): number {
  return Math.floor(step / width);
}

/** The smaller one; what is not a number has no say. */
function smaller(a: number, b: number): number {
  if (!Number.isFinite(a)) return b;
  return Number.isFinite(b) && b < a ? b : a;
}

function larger(a: number, b: number): number {
  if (!Number.isFinite(a)) return b;
  return Number.isFinite(b) && b > a ? b : a;
}
