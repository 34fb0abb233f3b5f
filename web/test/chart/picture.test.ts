import { expect, test } from "vitest";

import { alignRows, pickRows, toCsv } from "../../src/chart/csv";
import { appendPoint, coarsen, emptyCurve } from "../../src/chart/curve";
import { layOut } from "../../src/chart/picture";
import { smooth } from "../../src/chart/smoothing";
import { groupMetrics, isLog, readState, withoutFlips, writeState } from "../../src/chart/view_state";
import { changeQuery } from "../../src/router";

function curve(points: [number, number][]) {
  const made = emptyCurve("loss");
  for (const [step, value] of points) appendPoint(made, step, value, 0);
  return made;
}

test("runs with the same steps share rows of the CSV file, others leave cells empty", () => {
  const columns = [{ label: "a", curve: curve([[1, 0.5], [2, NaN]]) }, { label: "b", curve: curve([[2, 3], [5, -Infinity]]) }];
  expect(toCsv(columns)).toBe("step,a,b\r\n1,0.5,\r\n2,NaN,3\r\n5,,-Infinity\r\n");
  expect(alignRows(columns).map(({ step }) => step)).toEqual([1, 2, 5]);
});

test("buckets are exported with min and max", () => {
  const made = curve([[0, 1], [1, 3], [2, 2]]);
  coarsen(made, 1);
  expect(toCsv([{ label: "a", curve: made }])).toBe("step,a,a min,a max\r\n2,2,1,3\r\n");
});

test("a name is no formula and breaks no cell of a CSV file", () => {
  const head = toCsv([{ label: '=SUM(A1),"x"', curve: curve([]) }]).split("\r\n")[0];
  expect(head).toBe(`step,"'=SUM(A1),""x"""`);
});

test("a table shows the first and the last row", () => {
  const rows = alignRows([{ label: "a", curve: curve(Array.from({ length: 1000 }, (_, i) => [i, i])) }]);
  const picked = pickRows(rows, 200);
  expect([picked.length, picked[0]?.step, picked.at(-1)?.step]).toEqual([200, 0, 999]);
});

test("smoothing gives a curve between its extremes, passes gaps, and depends little on the width of buckets", () => {
  const xs = Array.from({ length: 2000 }, (_, i) => i);
  const values = xs.map((x) => x / 2000 + (x % 2 === 0 ? 0.5 : -0.5));
  values[700] = NaN;
  const fine = smooth(xs, values, 0.9, 2000);
  expect(fine[700]).toBeNaN();
  expect(Math.abs(fine[1000]! - 0.5)).toBeLessThan(0.06);
  const coarse = smooth(xs.filter((x) => x % 5 === 0), values.filter((_, x) => x % 5 === 0), 0.99, 2000);
  expect(Math.abs(coarse[200]! - smooth(xs, values, 0.99, 2000)[1000]!)).toBeLessThan(0.06);
  expect(smooth([0], [7], 0.9, 0)).toEqual([7]);
  expect(smooth(xs, values, 0, 2000)).toEqual(values);
});

test("entries of a legend go to the next row where there is no room", () => {
  expect(layOut([100, 100, 100], 300)).toEqual([{ x: 0, row: 0 }, { x: 140, row: 0 }, { x: 0, row: 1 }]);
});

test("the view is in the link, and what the link says wrongly is ignored", () => {
  const change = { kind: "wall", isLogY: true, smoothing: 0.6, zoom: [1.5, 9], flipped: ["y a"], hidden: ["sys"], search: "loss" } as const;
  const query = changeQuery(new URLSearchParams("tab=charts"), writeState(change));
  expect(readState(query)).toMatchObject(change);
  expect(changeQuery(query, writeState({ zoom: null, kind: "step", isLogY: false, smoothing: 0, flipped: [], hidden: [], search: "" })).toString())
    .toBe("tab=charts");
  const byMetric = { kind: "metric", xMetric: "sys/tokens" } as const;
  expect(readState(changeQuery(query, writeState(byMetric)))).toMatchObject(byMetric);
  expect(changeQuery(new URLSearchParams(), writeState(byMetric)).get("x")).toBe("m:sys/tokens");
  expect(readState(new URLSearchParams("x=m:"))).toMatchObject({ kind: "step", xMetric: "" });
  expect(readState(new URLSearchParams("x=moon&zoom=9~1&smooth=7"))).toMatchObject({ kind: "step", zoom: null, smoothing: 0.99 });
});

test("metrics are grouped by prefix, training first, and every word of a search must match", () => {
  const names = ["system/cpu", "val/loss", "train/loss", "train/acc", "lr"];
  expect(groupMetrics(names, "").map(({ prefix }) => prefix)).toEqual(["train", "", "val", "system"]);
  expect(groupMetrics(names, "LOSS tr")).toEqual([{ prefix: "train", names: ["train/loss"] }]);
});

test("a chart has the scales of all charts, unless its own were changed", () => {
  const state = readState(new URLSearchParams("logy=1&flip=y+loss&flip=x+loss"));
  expect([isLog(state, "y", "acc"), isLog(state, "y", "loss"), isLog(state, "x", "loss"), isLog(state, "x", "acc")]).toEqual([true, false, true, false]);
  expect(withoutFlips(state, "y")).toEqual(["x loss"]);
});
