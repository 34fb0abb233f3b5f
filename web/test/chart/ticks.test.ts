import { expect, test } from "vitest";

import { formatSpan, formatTick, linearTicks, logTicks, niceDistance, spanTicks, timeTicks } from "../../src/chart/ticks";

const labels = (ticks: readonly { label: string }[]): string[] => ticks.map(({ label }) => label);

test("ticks are round numbers, never more than there is room for", () => {
  expect(labels(linearTicks([0, 2000], 5))).toEqual(["0", "500", "1000", "1500", "2000"]);
  expect(labels(linearTicks([0, 2], 9, 1))).toEqual(["0", "1", "2"]); // there is no step 0.2
  expect(labels(linearTicks([1.2e17, 1.27e17], 5))).toEqual(["1.2e17", "1.22e17", "1.24e17", "1.26e17"]);
  expect(labels(linearTicks([-0.13, 0.13], 6))).toEqual(["-0.1", "-0.05", "0", "0.05", "0.1"]);
  for (const most of [2, 3, 7, 20]) {
    for (const range of [[0, 1], [3, 3.0001], [-5, 1e6], [1e9, 1e9 + 7]] as const) {
      const found = linearTicks(range, most);
      expect(found.length).toBeLessThanOrEqual(most + 1);
      expect(new Set(labels(found)).size).toBe(found.length);
    }
  }
  expect([niceDistance(1), niceDistance(1.1), niceDistance(3), niceDistance(0.07)].map((one) => Number(one.toPrecision(3)))).toEqual([1, 2, 5, 0.1]);
});

test("a log axis has powers of ten, more of them where few fit, and linear ticks within one", () => {
  expect(labels(logTicks([0.001, 1000], 7))).toEqual(["0.001", "0.01", "0.1", "1", "10", "100", "1000"]);
  expect(labels(logTicks([1, 100], 10))).toEqual(["1", "2", "5", "10", "20", "50", "100"]);
  expect(labels(logTicks([20, 60], 4))).toEqual(["20", "30", "40", "50", "60"]);
  expect(logTicks([1e-30, 1e30], 6).length).toBeLessThanOrEqual(7);
});

test("spans of time are counted in seconds, minutes, hours and days", () => {
  expect(labels(spanTicks([0, 3600], 6))).toEqual(["0", "10 min", "20 min", "30 min", "40 min", "50 min", "1h"]);
  expect(labels(spanTicks([0, 90], 4))).toEqual(["0", "30 s", "1:00", "1:30"]);
  expect(labels(spanTicks([0, 20 * 86_400], 3))).toEqual(["0", "7d", "14d"]);
  expect(labels(spanTicks([0, 0.4], 4))).toEqual(["0", "0.1 s", "0.2 s", "0.3 s", "0.4 s"]);
});

test("clock times are round in the reader's time zone, and a new day has its date", () => {
  const midnight = new Date(2026, 10, 19).getTime() / 1000;
  expect(labels(timeTicks([midnight - 7200, midnight + 7200], 4))).toEqual(["22:00", "23:00", "19 Nov", "01:00", "02:00"]);
  expect(labels(timeTicks([midnight + 5, midnight + 25], 4))).toEqual(["00:00:05", "00:00:10", "00:00:15", "00:00:20", "00:00:25"]);
});

test("labels are short", () => {
  expect([formatTick(0, 1), formatTick(1_500_000, 500_000), formatTick(20_000, 10_000), formatTick(0.25, 0.05), formatTick(2e-7, 1e-7)])
    .toEqual(["0", "1.5M", "20k", "0.25", "2e-7"]);
  expect([formatSpan(0.5, 0.1), formatSpan(90, 10), formatSpan(5400, 600), formatSpan(7200, 3600), formatSpan(172_800, 86_400)])
    .toEqual(["0.5 s", "1:30", "1h30", "2h", "2d"]);
});
