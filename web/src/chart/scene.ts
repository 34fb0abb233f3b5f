/* What a chart shows, ready to paint: curves placed on the x axis, their ranges, and marks on the axis. Pure. */

import {
  extent, joinRanges, padLinear, padLog, placeCurve, placeStep, type Range, type RunClock, type XKind,
} from "./axis";
import { type Curve, indexBefore, indexNearest } from "./curve";
import { smooth } from "./smoothing";

/** Steps that a later attempt trained again. */
export interface Discarded {
  attempt: number;
  curve: Curve;
}

/** A curve with what it belongs to. */
export interface Source {
  runId: string;
  label: string;
  colour: string;
  curve: Curve;
  /** Of all steps, also while `curve` is the detail of a zoom. */
  overview: Curve;
  clock: RunClock;
  /** For `overview`, where that is another one. */
  overviewClock?: RunClock;
  discarded: readonly Discarded[];
}

export interface View {
  kind: XKind;
  isLogX: boolean;
  isLogY: boolean;
  smoothing: number;
  zoom: Range | null;
}

export interface Line {
  source: Source;
  xs: Float64Array;
  smoothed: readonly number[];
  discarded: { xs: Float64Array; values: readonly number[] }[];
}

export interface Mark {
  kind: string;
  step: number;
  timeMs: number | null;
  text: string;
}

export interface PlacedMark {
  mark: Mark;
  x: number;
}

export interface Scene {
  lines: Line[];
  marks: PlacedMark[];
  /** Where there are points at all; what a reset of the zoom shows. */
  bounds: Range;
  x: Range;
  y: Range;
  /** Values that are NaN or infinite. */
  numNonFinite: number;
  /** Values that a log scale cannot show. */
  numHidden: number;
}

export function buildScene(sources: readonly Source[], marks: readonly Mark[], view: View): Scene {
  const placed = sources.map((source) => placeCurve(source.curve, view.kind, source.clock));
  const overviews = sources.map(({ curve, overview, clock, overviewClock = clock }, i) =>
    curve === overview ? placed[i]!.xs : placeCurve(overview, view.kind, overviewClock).xs,
  );
  const ownMarks = sources.length === 1 ? placeMarks(marks, sources[0]!, view.kind) : [];
  const starts = ownMarks.flatMap(({ mark, x: at }) => (STARTS.has(mark.kind) ? [at] : []));
  const bounds = findBounds([...overviews, Float64Array.from(starts)], view.isLogX);
  const x = view.zoom ?? bounds;
  const span = x[1] - x[0];
  const lines = sources.map((source, i): Line => {
    const { curve, xs } = placed[i]!;
    return {
      source: { ...source, curve },
      xs,
      smoothed: view.smoothing > 0 ? smooth(xs, curve.values, view.smoothing, span) : curve.values,
      discarded: source.discarded.map((part) => {
        const other = placeCurve(part.curve, view.kind, source.clock);
        return { xs: other.xs, values: other.curve.values };
      }),
    };
  });
  const [y, numHidden] = findHeights(lines, x, view);
  return {
    lines,
    marks: ownMarks,
    bounds,
    x,
    y,
    numNonFinite: lines.reduce((sum, line) => sum + countNonFinite(line, x), 0),
    numHidden,
  };
}

/** Marks before the first point: without them one could not see where a run begins or goes on from its parent. */
const STARTS = new Set(["attempt", "resume"]);

function findBounds(placed: readonly Float64Array[], isLog: boolean): Range {
  const range = joinRanges(
    placed.map((xs) => {
      const first = isLog ? indexBefore(xs, 0) + 1 : 0; // zero has no place on a log scale
      return first < xs.length ? ([xs[first]!, xs[xs.length - 1]!] as const) : null;
    }),
  );
  if (range === null) return isLog ? [1, 10] : [0, 1];
  if (range[0] < range[1]) return range;
  return isLog ? [range[0] / 2, range[1] * 2] : [range[0] - 1, range[1] + 1];
}

/** Indexes of the points in a range of x, with one more on both sides: lines run out of the picture. */
export function visible(xs: Float64Array, range: Range): [number, number] {
  return [Math.max(indexBefore(xs, range[0]), 0), Math.min(indexBefore(xs, range[1]) + 1, xs.length - 1)];
}

function findHeights(lines: readonly Line[], x: Range, view: View): [Range, number] {
  const ranges: (Range | null)[] = [];
  let smallest = Infinity;
  let numHidden = 0;
  for (const { source, xs, discarded } of lines) {
    const [from, to] = visible(xs, x);
    for (const values of [source.curve.mins, source.curve.maxs, source.curve.values]) {
      const found = extent(values, from, to);
      ranges.push(found.range);
      smallest = Math.min(smallest, found.smallest);
    }
    for (const part of discarded) ranges.push(extent(part.values, ...visible(part.xs, x)).range);
    if (view.isLogY) for (let i = from; i <= to; i++) if (source.curve.values[i]! <= 0) numHidden += 1;
  }
  const range = joinRanges(ranges);
  return [view.isLogY ? padLog(range, smallest) : padLinear(range), numHidden];
}

function countNonFinite({ source, xs }: Line, x: Range): number {
  const [from, to] = visible(xs, x);
  let count = 0;
  for (let i = from; i <= to; i++) if (!Number.isFinite(source.curve.values[i])) count += 1;
  return count;
}

function placeMarks(marks: readonly Mark[], source: Source, kind: XKind): PlacedMark[] {
  const placed: PlacedMark[] = [];
  for (const mark of marks) {
    const x = placeStep(mark.step, mark.timeMs, kind, source.clock, source.curve);
    if (x !== null) placed.push({ mark, x });
  }
  return placed.sort((a, b) => a.x - b.x);
}

export interface Reading {
  line: Line;
  index: number;
  x: number;
  step: number;
  value: number;
  smoothed: number;
}

/** What each line has nearest to a place of the axis; lines that are not there give nothing. */
export function readAt(scene: Scene, x: number): Reading[] {
  const reach = (scene.x[1] - scene.x[0]) / 50;
  return scene.lines.flatMap((line) => {
    const { xs } = line;
    return x < xs[0]! - reach || x > xs[xs.length - 1]! + reach ? [] : readLine(line, indexNearest(xs, x));
  });
}

/** The point of the last step of each line that is in the picture: on the axis of a metric that may be anywhere. */
export function readEnds(scene: Scene): Reading[] {
  return scene.lines.flatMap((line) => {
    const { steps } = line.source.curve;
    let last = -1;
    for (let i = indexBefore(line.xs, scene.x[1]); i >= 0 && line.xs[i]! >= scene.x[0]; i--) {
      if (last < 0 || steps[i]! > steps[last]!) last = i;
    }
    return readLine(line, last);
  });
}

function readLine(line: Line, index: number): Reading[] {
  if (index < 0) return [];
  const { steps, values } = line.source.curve;
  return [{ line, index, x: line.xs[index]!, step: steps[index]!, value: values[index]!, smoothed: line.smoothed[index]! }];
}
