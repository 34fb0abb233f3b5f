import { expect, test } from "vitest";

import { appendPoint, coarsen, type Curve, emptyCurve, indexBefore, indexNearest, readNumber, readSeries } from "../../src/chart/curve";

function raw(points: [number, number][]): Curve {
  const curve = emptyCurve("loss");
  for (const [step, value] of points) appendPoint(curve, step, value, step * 10);
  return curve;
}

test("the words of the API and of events for non-finite values become numbers", () => {
  expect([readNumber("Infinity"), readNumber("-Infinity"), readNumber("inf"), readNumber("-inf")]).toEqual([Infinity, -Infinity, Infinity, -Infinity]);
  expect([readNumber("NaN"), readNumber("nan"), readNumber(null)]).toEqual([NaN, NaN, NaN]);
});

test("raw points of the API have their value as min and max", () => {
  const curve = readSeries({
    name: "loss", steps: [1, 2], values: [3, "nan"], mins: [], maxs: [], counts: [], timestamps_ms: [5, 6], num_points: 2, width: 1,
  });
  expect(curve.mins).toEqual([3, NaN]);
  expect(curve.counts).toEqual([1, 1]);
});

test("a live point in the newest bucket changes its last value, min, max and count", () => {
  const curve = emptyCurve("loss", 4);
  for (const [step, value] of [[0, 5], [1, 2], [3, 4], [4, 9]] as const) appendPoint(curve, step, value, 0);
  expect(curve.steps).toEqual([3, 4]);
  expect(curve.values).toEqual([4, 9]);
  expect(curve.mins).toEqual([2, 9]);
  expect(curve.maxs).toEqual([5, 9]);
  expect(curve.counts).toEqual([3, 1]);
});

test("a point that was fetched already is not counted again", () => {
  const curve = raw([[1, 1], [2, 2]]);
  expect(appendPoint(curve, 2, 7, 0)).toBe(false);
  expect(curve.numPoints).toBe(2);
});

test("a non-finite value does not become min or max, and is the last value", () => {
  const curve = emptyCurve("loss", 8);
  for (const [step, value] of [[0, 5], [1, NaN], [2, 3], [3, Infinity]] as const) appendPoint(curve, step, value, 0);
  expect([curve.mins[0], curve.maxs[0], curve.values[0]]).toEqual([3, 5, Infinity]);
});

test("coarser buckets are those that the widths' own grid gives, whatever came live", () => {
  const steps = Array.from({ length: 1000 }, (_, i) => i * 3);
  const curve = raw(steps.map((step) => [step, Math.sin(step)]));
  coarsen(curve, 100);
  expect(curve.steps.length).toBeLessThanOrEqual(100);
  expect(curve.counts.reduce((sum, count) => sum + count, 0)).toBe(1000);
  curve.steps.forEach((last, i) => {
    const own = steps.filter((step) => Math.floor(step / curve.width) === Math.floor(last / curve.width));
    const values = own.map(Math.sin);
    expect([last, curve.counts[i], curve.values[i], curve.mins[i], curve.maxs[i]])
      .toEqual([own.at(-1), own.length, values.at(-1), Math.min(...values), Math.max(...values)]);
  });
});

test("a million live points keep a fixed number of buckets and lose no extreme", () => {
  const curve = emptyCurve("loss");
  for (let step = 0; step < 1_000_000; step++) {
    appendPoint(curve, step, step === 654_321 ? 100 : 0, 0);
    if (curve.steps.length > 2000) coarsen(curve, 1000);
  }
  expect(curve.steps.length).toBeLessThanOrEqual(2000);
  expect(curve.numPoints).toBe(1_000_000);
  expect(Math.max(...curve.maxs)).toBe(100);
});

test("places in ascending lists are found", () => {
  const xs = [1, 3, 5];
  expect([0, 1, 4, 9].map((x) => indexBefore(xs, x))).toEqual([-1, 0, 1, 2]);
  expect([0, 1.9, 2.1, 9].map((x) => indexNearest(xs, x))).toEqual([0, 0, 1, 2]);
  expect(indexNearest([], 1)).toBe(-1);
});
