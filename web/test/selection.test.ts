import { describe, expect, test } from "vitest";

import {
  estimateLeft, filterRuns, findRoot, groupRuns, mainMetric, readFilter, readSpeed, readSpread, readTableQuery, sortRuns, topMetrics,
} from "../src/runs/selection";
import { makeRun } from "./records";

const ask = (text: string) => readTableQuery(new URLSearchParams(text));
const ids = (runs: readonly { run_id: string }[]) => runs.map((run) => run.run_id);

describe("text filter", () => {
  const run = makeRun({ run_id: "mnist.2", name: "Big MNIST", reason: "waits for gpu", tags: { lr: "high" }, metrics: { "train/loss": 0.25, "val/loss": 0.3, "val/acc": 0.9 }, step: 70 });
  test.each([
    ["", true], ["mnist", true], ["MNIST gpu", true], ["mnist cifar", false], ["-cifar", true], ["-mnist", false],
    ["/^mnist\\.\\d$/", true], ["/^2$/", false], ["/mnist\\.\\d/", true], ["/[/", false], ["lr:high", true],
    ["train/loss<0.3", true], ["train/loss<0.2", false], ["acc>=0.9", true], ["acc>0.9", false], ["step=70", true],
    ["loss<1", false], // two metrics end so: neither is meant
    ["missing>0", false], ["-acc>0.95", true],
  ])("%s", (text, expected) => expect(readFilter(text)(run)).toBe(expected));
});

test("states are alternatives, tags must all hold", () => {
  const runs = [
    makeRun({ run_id: "a", tags: { x: "1", y: "1" } }),
    makeRun({ run_id: "b", state: "FAILED", tags: { x: "1" } }),
    makeRun({ run_id: "c", state: "PENDING", tags: { group: "g" } }),
  ];
  expect(ids(filterRuns(runs, ask("state=FAILED&state=PENDING")))).toEqual(["b", "c"]);
  expect(ids(filterRuns(runs, ask("tag=x:1")))).toEqual(["a", "b"]);
  expect(ids(filterRuns(runs, ask("tag=x:1&tag=y")))).toEqual(["a"]);
  expect(ids(filterRuns(runs, ask("tag=group:g")))).toEqual(["c"]);
});

describe("order", () => {
  const runs = [
    makeRun({ run_id: "r10", submitted_ms: 1, metrics: { loss: 3 } }),
    makeRun({ run_id: "r2", submitted_ms: 2, metrics: { loss: "nan" } }),
    makeRun({ run_id: "r1", submitted_ms: 3, metrics: { loss: 1 } }),
    makeRun({ run_id: "r3", submitted_ms: 4 }),
  ];
  test("the newest first where nothing is asked", () => expect(ids(sortRuns(runs, ask("").sort))).toEqual(["r3", "r1", "r2", "r10"]));
  test("names as people count", () => expect(ids(sortRuns(runs, "run"))).toEqual(["r1", "r2", "r3", "r10"]));
  test("runs without a number stand last, up and down", () => {
    expect(ids(sortRuns(runs, "m:loss"))).toEqual(["r1", "r10", "r3", "r2"]);
    expect(ids(sortRuns(runs, "-m:loss"))).toEqual(["r10", "r1", "r3", "r2"]);
  });
});

describe("groups", () => {
  const runs = [
    makeRun({ run_id: "none" }), makeRun({ run_id: "a", tags: { set: "x" } }), makeRun({ run_id: "b", tags: { set: "y" } }),
    makeRun({ run_id: "c", tags: { set: "x" } }),
  ];
  const all = new Map(runs.map((run) => [run.run_id, run]));
  const shape = (text: string) => groupRuns(runs, ask(text), all).map((item) => (item.kind === "run" ? item.run.run_id : `${item.key}(${item.runs.length})`));
  test("by a tag, those without it last", () => expect(shape("by=tag:set")).toEqual(["x(2)", "a", "c", "y(1)", "b", "(1)", "none"]));
  test("a collapsed group keeps its count", () => expect(shape("by=tag:set&shut=x")).toEqual(["x(2)", "y(1)", "b", "(1)", "none"]));
  test("none", () => expect(shape("")).toEqual(["none", "a", "b", "c"]));

  test("descendants stand with their oldest ancestor, also a removed one; a circle ends", () => {
    const family = [
      makeRun({ run_id: "p" }), makeRun({ run_id: "p.2", parent_run_id: "p" }), makeRun({ run_id: "p.3", parent_run_id: "p.2" }),
      makeRun({ run_id: "q", parent_run_id: "gone" }), makeRun({ run_id: "u", parent_run_id: "v" }), makeRun({ run_id: "v", parent_run_id: "u" }),
    ];
    const byId = new Map(family.map((run) => [run.run_id, run]));
    expect(family.slice(0, 4).map((run) => findRoot(run, byId))).toEqual(["p", "p", "p", "gone"]);
    expect(typeof findRoot(family[4]!, byId)).toBe("string");
  });
});

describe("what a narrow table shows", () => {
  test("the training loss is the main metric", () => {
    expect(mainMetric(makeRun({ metrics: { "val/loss": 1, "train/loss": 2 } }))).toBe("train/loss");
    expect(mainMetric(makeRun({ metrics: { z: 1, a: 2 } }))).toBe("a");
    expect(mainMetric(makeRun())).toBeNull();
  });
  test("validation before the rest, learning rate last", () =>
    expect(topMetrics(makeRun({ metrics: { "train/lr": 1, other: 1, "val/acc": 1, "train/loss": 1 } }), 3)).toEqual(["train/loss", "val/acc", "other"]));
});

test("a group has the spread of its main metric over all runs that have it", () => {
  const runs = [3, 1, "nan", 2, 10].map((loss) => makeRun({ metrics: { "train/loss": loss as number } }));
  expect(readSpread([...runs, makeRun({ metrics: { other: 5 } })])).toEqual({ name: "train/loss", min: 1, median: 2.5, max: 10 });
  expect(readSpread([makeRun()])).toBeNull();
});

describe("time left", () => {
  test("from the speed of the newest steps", () => {
    const speed = readSpeed([0, 10, 20, 30, 40, 50, 60, 70, 80], [0, 99999, 99999, 99999, 100_000, 100_250, 100_500, 100_750, 101_000]);
    expect(speed).toBeCloseTo(0.04);
    expect(estimateLeft(makeRun({ step: 80, end_step: 100 }), speed)).toBeCloseTo(500);
  });
  test("unknown without an end, without points, or when it does not run", () => {
    expect(readSpeed([1], [1])).toBeNull();
    expect(estimateLeft(makeRun({ step: 5 }), 1)).toBeNull();
    expect(estimateLeft(makeRun({ step: 5, end_step: 9, state: "PENDING" }), 1)).toBeNull();
  });
});
