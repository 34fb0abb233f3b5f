import { expect, test } from "vitest";

import type { RunClock } from "../../src/chart/axis";
import { appendPoint, coarsen, type Curve, emptyCurve } from "../../src/chart/curve";
import { paintScene } from "../../src/chart/paint";
import { Painter } from "../../src/chart/painter";
import { buildScene, readAt, readEnds, type Source, type View } from "../../src/chart/scene";

const clock: RunClock = { stepsPerEpoch: null, attempts: [] };
const view: View = { kind: "step", isLogX: false, isLogY: false, smoothing: 0, zoom: null };

function source(points: [number, number][], more: Partial<Source> = {}): Source {
  const curve = emptyCurve("loss");
  for (const [step, value] of points) appendPoint(curve, step, value, step * 1000);
  return { runId: "a", label: "a", colour: "red", curve, overview: curve, clock, discarded: [], ...more };
}

test("a scene shows all points, with room above and below", () => {
  const scene = buildScene([source([[0, 1], [10, 3]])], [], view);
  expect(scene.x).toEqual([0, 10]);
  expect(scene.y[0]).toBeLessThan(1);
  expect(scene.y[1]).toBeGreaterThan(3);
});

test("the height of a zoomed scene is that of what is visible", () => {
  const scene = buildScene([source([[0, 1000], [5, 2], [6, 3], [7, 2], [20, 1000]])], [], { ...view, zoom: [5.5, 6.5] });
  expect(scene.y[1]).toBeLessThan(5);
  expect(scene.bounds).toEqual([0, 20]);
});

test("the bounds of a detail are those of the whole curve", () => {
  const whole = source([[0, 1], [100, 1]]).curve;
  expect(buildScene([source([[40, 1], [50, 1]], { overview: whole })], [], { ...view, zoom: [40, 50] }).bounds).toEqual([0, 100]);
});

test("values that are not finite, or not above zero on a log scale, are counted and leave the range alone", () => {
  const points: [number, number][] = [[0, NaN], [1, -5], [2, 10], [3, Infinity], [4, 100]];
  const scene = buildScene([source(points)], [], { ...view, isLogY: true });
  expect([scene.numNonFinite, scene.numHidden]).toEqual([2, 1]);
  expect(scene.y[0]).toBeGreaterThan(1);
});

test("step 0 has no place on a log axis", () => {
  expect(buildScene([source([[0, 1], [1, 1], [100, 1]])], [], { ...view, isLogX: true }).x).toEqual([1, 100]);
  expect(buildScene([source([[0, 1]])], [], { ...view, isLogX: true }).x).toEqual([1, 10]);
});

test("the cursor reads the nearest point of each curve, and none of a curve that is not there", () => {
  const scene = buildScene([source([[0, 1], [10, 2], [1000, 3]]), source([[0, 5], [20, 6]], { runId: "b" })], [], view);
  expect(readAt(scene, 12).map(({ line, step, value }) => [line.source.runId, step, value])).toEqual([["a", 10, 2], ["b", 20, 6]]);
  expect(readAt(scene, 900).map(({ line }) => line.source.runId)).toEqual(["a"]);
});

test("without a cursor each curve says its last value in the picture, also one that ended early", () => {
  const sources = [source([[0, 1], [10, 2], [60, 3]]), source([[0, 5], [100, 6]], { runId: "b" })];
  const ends = (zoom: [number, number] | null) => readEnds(buildScene(sources, [], { ...view, zoom })).map(({ value }) => value);
  expect(ends(null)).toEqual([3, 6]);
  expect(ends([0, 20])).toEqual([2, 5]);
  expect(ends([70, 100])).toEqual([6]);
  const falling = source([[0, 1], [10, 2]], {});
  const by = { ...clock, ruler: source([[0, 9], [10, 4]]).curve };
  const scene = buildScene([{ ...falling, clock: by }], [{ kind: "end", step: 10, timeMs: null, text: "" }, { kind: "end", step: 0, timeMs: null, text: "" }], { ...view, kind: "metric" });
  expect(scene.lines.map(({ xs }) => [...xs])).toEqual([[4, 9]]);
  expect(readEnds(scene).map(({ step, value }) => [step, value])).toEqual([[10, 2]]);
  expect(scene.marks.map(({ x }) => x)).toEqual([4, 9]);
});

test("marks are placed on the axis of one run, and left out where there are several", () => {
  const marks = [{ kind: "checkpoint", step: 5, timeMs: null, text: "checkpoint" }];
  expect(buildScene([source([[0, 1], [9, 1]])], marks, view).marks.map(({ x }) => x)).toEqual([5]);
  expect(buildScene([source([[0, 1]]), source([[0, 1]])], marks, view).marks).toEqual([]);
});

/** Records what is drawn. */
function canvas() {
  const calls: string[] = [];
  const target: Record<string, unknown> = {};
  const ctx = new Proxy(target, {
    get: (own, name: string) => own[name] ?? ((...given: number[]) => calls.push([name, ...given.map(Math.round)].join(" "))),
    set: (own, name: string, value) => { own[name] = value; return true; },
  }) as unknown as CanvasRenderingContext2D;
  return { ctx, calls };
}

const palette = { text: "", muted: "", grid: "", bad: "", good: "", accent: "", surface: "" };
const options = { isLogX: false, isLogY: false, isSmoothed: false, highlight: null, palette };
const area = { left: 0, top: 0, width: 100, height: 100, ratio: 1 };

function paint(curve: Curve) {
  const { ctx, calls } = canvas();
  const made = source([]);
  const scene = { ...buildScene([{ ...made, curve, overview: curve }], [], view), y: [0, 10] as const };
  paintScene(ctx, scene, area, options);
  return calls;
}

test("a line breaks at a value that is not finite, which is marked with a cross", () => {
  const calls = paint(source([[0, 5], [50, 5], [60, NaN], [70, 5], [100, 5]]).curve);
  const stroke = calls.slice(calls.indexOf("beginPath", calls.indexOf("clip")), calls.indexOf("stroke"));
  expect(stroke).toEqual(["beginPath", "moveTo 0 50", "lineTo 50 50", "moveTo 70 50", "lineTo 100 50"]);
  expect(calls).toContain("lineTo 63 91"); // the cross
});

test("a bucketed curve of any length costs its buckets", () => {
  const curve = emptyCurve("loss");
  for (let step = 0; step < 100_000; step++) appendPoint(curve, step, 5, 0);
  coarsen(curve, 500);
  expect(paint(curve).length).toBeLessThan(5 * 500);
});

/** A browser whose time passes by hand, in frames of 16 ms. */
function browser() {
  let now = 0;
  let frame: (() => void) | null = null;
  let timers: { at: number; handle: () => void }[] = [];
  let numFrames = 0;
  const timing = {
    nowMs: () => now,
    askFrame: (handle: () => void) => { frame = handle; },
    wait: (handle: () => void, ms: number) => { timers.push({ at: now + ms, handle }); },
  };
  const pass = (ms: number): void => {
    for (const end = now + ms; now < end;) {
      now += 16;
      const due = timers.filter(({ at }) => at <= now);
      timers = timers.filter(({ at }) => at > now);
      for (const { handle } of due) handle();
      const run = frame;
      frame = null;
      if (run !== null) numFrames += 1;
      run?.();
    }
  };
  return { timing, pass, frames: () => numFrames };
}

test("live changes of all charts share frames, ten a second at most", () => {
  const { timing, pass, frames } = browser();
  const painter = new Painter(timing);
  const charts = [{}, {}, {}];
  let numPainted = 0;
  for (let i = 0; i < 60; i++) {
    painter.request(charts[i % 3]!, () => { numPainted += 1; }, true);
    pass(16);
  }
  pass(200);
  expect(frames()).toBeLessThanOrEqual(12);
  expect(numPainted).toBeLessThanOrEqual(3 * 12);
  expect(numPainted).toBeGreaterThanOrEqual(3 * 8);
  const before = frames();
  pass(1000);
  expect(frames()).toBe(before); // nothing to paint, no frames
});

test("what a person does is painted with the next frame, also after a live change, and once", () => {
  const { timing, pass } = browser();
  const painter = new Painter(timing);
  const chart = {};
  let numPainted = 0;
  const request = (isLive: boolean) => painter.request(chart, () => { numPainted += 1; }, isLive);
  request(true);
  pass(16);
  expect(numPainted).toBe(1);
  request(true);
  request(false);
  request(true);
  pass(16);
  expect(numPainted).toBe(2);
  request(true);
  pass(200);
  expect(numPainted).toBe(3);
  request(true);
  painter.forget(chart);
  pass(200);
  expect(numPainted).toBe(3);
});

test("a live change whose timer comes a part of a millisecond early is painted nevertheless", () => {
  let now = 0;
  const waits: { at: number; handle: () => void }[] = [];
  const painter = new Painter({
    nowMs: () => now,
    askFrame: (handle) => handle(), // at once, as where the browser was about to draw
    wait: (handle, ms) => { waits.push({ at: now + Math.trunc(ms), handle }); }, // as browsers do
  });
  let numPainted = 0;
  const request = (): void => painter.request({}, () => { numPainted += 1; }, true);
  request();
  now = 40.4;
  request();
  expect(numPainted).toBe(1);
  for (let next = waits.shift(); next !== undefined; next = waits.shift()) {
    now = next.at;
    next.handle();
  }
  expect(numPainted).toBe(2);
});

test("where a run begins is in the picture, also before its first point", () => {
  const bounds = (kind: string, step: number, more: Partial<View> = {}) =>
    buildScene([source([[10, 1], [100, 2]])], [{ kind, step, timeMs: null, text: "" }], { ...view, ...more }).bounds;
  expect(bounds("attempt", 0)).toEqual([0, 100]);
  expect(bounds("resume", 5)).toEqual([5, 100]);
  expect(bounds("checkpoint", 5)).toEqual([10, 100]);
  expect(bounds("attempt", 0, { isLogX: true })).toEqual([10, 100]);
});
