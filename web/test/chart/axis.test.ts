import { expect, test } from "vitest";

import { padLinear, padLog, pan, placeCurve, placePoints, placeStep, possibleKinds, type RunClock, stepsBetween, trainingMs, zoomAround } from "../../src/chart/axis";
import { appendPoint, emptyCurve } from "../../src/chart/curve";

const clock: RunClock = {
  stepsPerEpoch: 10,
  attempts: [{ launchedMs: 1000, endedMs: 3000 }, { launchedMs: 9000, endedMs: null }],
};

function curve(points: [step: number, timeMs: number][]) {
  const made = emptyCurve("loss");
  for (const [step, timeMs] of points) appendPoint(made, step, 1, timeMs);
  return made;
}

test("training time leaves out the wait between two attempts", () => {
  expect([500, 2000, 5000, 10_000].map((ms) => trainingMs(ms, clock.attempts))).toEqual([0, 1000, 2000, 3000]);
});

test("points are placed by step, epoch, wall and training time", () => {
  const made = curve([[10, 2000], [20, 10_000]]);
  const places = (kind: "step" | "epoch" | "wall" | "training") => [...placePoints(made, kind, clock)];
  expect(places("step")).toEqual([10, 20]);
  expect(places("epoch")).toEqual([1, 2]);
  expect(places("wall")).toEqual([2, 10]);
  expect(places("training")).toEqual([1, 3]);
});

test("a clock that was set back does not fold the curve", () => {
  expect([...placePoints(curve([[1, 5000], [2, 4000], [3, 6000]]), "wall", clock)]).toEqual([5, 5, 6]);
});

test("an epoch axis is offered only where every run's epoch has a known length", () => {
  expect(possibleKinds([clock])).toContain("epoch");
  expect(possibleKinds([clock, { ...clock, stepsPerEpoch: null }])).not.toContain("epoch");
});

test("a mark without a time is placed by the point before it", () => {
  const made = curve([[10, 2000], [20, 10_000]]);
  expect(placeStep(15, null, "wall", clock, made)).toBe(2);
  expect(placeStep(15, 2500, "training", clock, made)).toBe(1.5);
  expect(placeStep(15, null, "epoch", { ...clock, stepsPerEpoch: null }, made)).toBe(null);
});

test("a zoom by time asks for the steps that were trained in it", () => {
  const made = curve([[10, 2000], [20, 3000], [30, 10_000], [40, 11_000]]);
  expect(stepsBetween([2.5, 10.5], "wall", clock, made)).toEqual([9, 40]);
  expect(stepsBetween([1.2, 2.1], "epoch", clock, made)).toEqual([12, 21]);
  expect(stepsBetween([0, 1], "wall", clock, null)).toBe(null);
});

test("zooming stays within what there is; zooming out to all of it is no zoom", () => {
  expect(zoomAround([0, 100], [0, 100], 50, 0.5, 1)).toEqual([25, 75]);
  expect(zoomAround([0, 50], [0, 100], 0, 0.5, 1)).toEqual([0, 25]);
  expect(zoomAround([25, 75], [0, 100], 50, 2, 1)).toBe(null);
  expect(zoomAround([50, 51], [0, 100], 50.5, 0.1, 1)).toEqual([50, 51]);
  expect(pan([10, 20], [0, 100], -2)).toEqual([0, 10]);
  expect(pan([80, 95], [0, 100], 1)).toEqual([85, 100]);
});

test("ranges can always be shown: constant, empty, and below zero on a log scale", () => {
  expect(padLinear([5, 5])).toEqual([4.5, 5.5]);
  expect(padLinear(null)).toEqual([0, 1]);
  const [low, high] = padLog([-3, 100], 0.1);
  expect(low).toBeGreaterThan(0.05);
  expect(high).toBeGreaterThan(100);
  expect(padLog([-3, -1], Infinity)).toEqual([0.1, 10]);
  expect(padLog([2, 2], 2)).toEqual([1, 4]);
});

test("on the axis of a metric points are in its order, between its points, and left out where it has none", () => {
  const loss = emptyCurve("val/loss");
  for (const [step, value] of [[2, 8], [4, 2], [6, 5], [8, NaN]] as const) appendPoint(loss, step, value, 0);
  const by = { ...clock, ruler: loss };
  const { curve: placed, xs } = placeCurve(curve([[1, 0], [2, 0], [3, 0], [4, 0], [6, 0], [8, 0], [9, 0]]), "metric", by);
  expect([...xs]).toEqual([2, 5, 5, 8]);
  expect(placed.steps).toEqual([4, 3, 6, 2]);
  expect(placeStep(3, null, "metric", by, null)).toBe(5);
  expect(placeStep(1, null, "metric", by, null)).toBe(null);
  expect(stepsBetween([1, 5], "metric", by, null)).toEqual([3, 7]);
  expect(stepsBetween([20, 30], "metric", by, null)).toBe(null);
  expect([...placeCurve(curve([[1, 0]]), "metric", { ...clock, ruler: null }).xs]).toEqual([]);
});
