import { expect, test } from "vitest";

import type { Range } from "../../src/chart/axis";
import { appendPoint, emptyCurve } from "../../src/chart/curve";
import { type CurveSet, MetricFeed, readValues, type Wanted } from "../../src/chart/feed";
import type { TrainerEvent } from "../../src/types";

function setOf(points: Record<string, [number, number][]>): CurveSet {
  return new Map(Object.entries(points).map(([run, own]) => {
    const curve = emptyCurve("loss");
    for (const [step, value] of own) appendPoint(curve, step, value, 0);
    return [run, { curve, discarded: [] }];
  }));
}

function metric(name: string, step: number, value: number, attempt = 1): TrainerEvent {
  return { event: "metric", seq: step, attempt, timestamp_ms: step, name, value, step };
}

/** A feed whose requests are answered by hand. */
function open(maxPoints = 100) {
  const asked: { wanted: Wanted; answer: (found: Map<string, CurveSet>) => Promise<void>; abort: AbortSignal }[] = [];
  const errors: unknown[] = [];
  const feed = new MetricFeed(
    (wanted, abort) => new Promise((resolve, reject) => {
      abort.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
      asked.push({ wanted, abort, answer: async (found) => { resolve(found); await settle(); } });
    }),
    maxPoints,
    (error) => errors.push(error),
  );
  return { feed, asked, errors };
}

const settle = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 0));
const steps = (feed: MetricFeed, name: string, run = "r") => feed.curves(name)?.get(run)?.curve.steps;

test("charts that appear together are fetched with one request, and hidden ones not at all", async () => {
  const { feed, asked } = open();
  feed.show("a", () => undefined);
  feed.show("b", () => undefined);
  await settle();
  expect(asked.map(({ wanted }) => wanted.names)).toEqual([["a", "b"]]);
  feed.take("r", [metric("hidden", 1, 1)]);
  expect(feed.curves("hidden")).toBe(null);
});

test("points that came while the request was on its way are neither lost nor counted twice", async () => {
  const { feed, asked } = open();
  feed.show("loss", () => undefined);
  await settle();
  feed.take("r", [metric("loss", 2, 2), metric("loss", 3, 3)]);
  await asked[0]!.answer(new Map([["loss", setOf({ r: [[1, 1], [2, 2]] })]]));
  expect(steps(feed, "loss")).toEqual([1, 2, 3]);
  expect(feed.curves("loss")!.get("r")!.curve.numPoints).toBe(3);
});

test("a chart is told of live points, and of nothing else", async () => {
  const { feed, asked } = open();
  const told: boolean[] = [];
  feed.show("loss", (isLive) => told.push(isLive));
  await settle();
  await asked[0]!.answer(new Map([["loss", setOf({ r: [[1, 1]] })]]));
  feed.take("r", [metric("loss", 2, 2), metric("other", 2, 2)]);
  feed.take("r", [metric("other", 3, 2)]);
  feed.take("r", [metric("loss", 2, 2)]);
  expect(told).toEqual([false, true]);
});

test("the number of buckets stays fixed however long a run is watched", async () => {
  const { feed, asked } = open(50);
  feed.show("loss", () => undefined);
  await settle();
  await asked[0]!.answer(new Map());
  for (let step = 0; step < 20_000; step++) feed.take("r", [metric("loss", step, 1)]);
  expect(steps(feed, "loss")!.length).toBeLessThanOrEqual(100);
  expect(feed.curves("loss")!.get("r")!.curve.numPoints).toBe(20_000);
});

test("what is read again while it is being read is read once more after it", async () => {
  const { feed, asked } = open();
  feed.show("loss", () => undefined);
  await settle();
  feed.refetch(); // another line of descent is wanted, say
  await settle();
  expect(asked.length).toBe(1);
  await asked[0]!.answer(new Map([["loss", setOf({ r: [[1, 1]] })]]));
  expect(asked.length).toBe(2);
  await asked[1]!.answer(new Map([["loss", setOf({ r: [[0, 1], [1, 1]] })]]));
  expect(steps(feed, "loss")).toEqual([0, 1]);
  expect(asked.length).toBe(2);
});

test("an attempt that goes back fetches the curve again", async () => {
  const { feed, asked } = open();
  feed.show("loss", () => undefined);
  await settle();
  await asked[0]!.answer(new Map([["loss", setOf({ r: [[1, 1], [2, 2]] })]]));
  feed.take("r", [metric("loss", 3, 3, 1)]);
  feed.take("r", [metric("loss", 2, 2, 2)]);
  await expect.poll(() => asked.length, { timeout: 10_000 }).toBe(2);
  await asked[1]!.answer(new Map([["loss", setOf({ r: [[1, 1], [2, 2]] })]]));
  expect(steps(feed, "loss")!.at(-1)).toBe(3);
});

test("a zoom shows what is there until its detail comes, and a newer zoom ends an older request", async () => {
  const { feed, asked } = open();
  feed.show("loss", () => undefined);
  await settle();
  await asked[0]!.answer(new Map([["loss", setOf({ r: [[1, 1], [100, 2]] })]]));
  feed.zoom([1, 50]);
  feed.zoom([1, 9] as Range);
  expect(asked[1]!.abort.aborted).toBe(true);
  expect(steps(feed, "loss")).toEqual([1, 100]);
  await asked[2]!.answer(new Map([["loss", setOf({ r: [[1, 1], [5, 2]] })]]));
  expect(asked[2]!.wanted.steps).toEqual([1, 9]);
  expect(steps(feed, "loss")).toEqual([1, 5]);
  feed.take("r", [metric("loss", 101, 1)]);
  expect(steps(feed, "loss")).toEqual([1, 5]); // beyond the zoom
  feed.zoom(null);
  expect(steps(feed, "loss")).toEqual([1, 100, 101]);
});

test("a failure is said once, and an ended request is no failure", async () => {
  const errors: unknown[] = [];
  const feed = new MetricFeed(() => Promise.reject(new Error("down")), 10, (error) => errors.push(error));
  feed.show("loss", () => undefined);
  await settle();
  expect(errors).toHaveLength(1);
  const other = open();
  other.feed.show("loss", () => undefined);
  await settle();
  other.feed.close();
  await settle();
  expect(other.errors).toEqual([]);
});

test("all kinds of events that carry metrics are read", () => {
  const head = { seq: 1, attempt: 1, timestamp_ms: 1, step: 1 };
  expect(readValues({ ...head, event: "metric", name: "a", value: "nan" })).toEqual([["a", NaN]]);
  expect(readValues({ ...head, event: "metrics", values: { a: 1, b: "inf" } })).toEqual([["a", 1], ["b", Infinity]]);
  expect(readValues({ ...head, event: "validation", values: { "val/loss": 3 } })).toEqual([["val/loss", 3]]);
  expect(readValues({ ...head, event: "heartbeat" })).toEqual([]);
});
