import { describe, expect, test } from "vitest";

import { listActions } from "../src/actions/actions";
import { diffTags } from "../src/actions/edit_dialog";
import { toggleColumn } from "../src/runs/chosen_columns";
import { drawPath } from "../src/runs/sparkline";
import { isStale, readTrend } from "../src/runs/trends";
import { findRow, measureRows } from "../src/runs/virtual_rows";
import { findShortcut } from "../src/shortcuts";
import { makeRun, makeSeries } from "./records";

describe("tags", () => {
  test("only what changed is sent; a tag that is gone is null", () =>
    expect(diffTags({ a: "1", b: "2", c: "3" }, [{ key: "a", value: "1" }, { key: " b ", value: "5" }, { key: "", value: "x" }, { key: "d", value: "" }]))
      .toEqual({ b: "5", c: null, d: "" }));
});

describe("columns", () => {
  const order = ["state", "run", "metrics", "why"];
  test("a new one stands at its usual place", () => expect(toggleColumn(["state", "run", "why"], "metrics", order)).toEqual(["state", "run", "metrics", "why"]));
  test("a metric stands after the newest metrics", () => expect(toggleColumn(["run", "metrics", "why"], "m:x", order)).toEqual(["run", "metrics", "m:x", "why"]));
  test("the name of a run stays", () => expect(toggleColumn(["run"], "run", order)).toEqual(["run"]));
  test("others go", () => expect(toggleColumn(["run", "why"], "why", order)).toEqual(["run"]));
});

describe("sparklines", () => {
  test("fill their box, high values at the top", () => expect(drawPath([[0, 0], [5, 10], [10, 5]], 102, 24)).toBe("M1.0 22.0L51.0 2.0L101.0 12.0"));
  test("a flat curve is a line in the middle", () => expect(drawPath([[0, 3], [1, 3]], 12, 20)).toBe("M1.0 10.0L11.0 10.0"));
  test("one point is no curve", () => expect(drawPath([[0, 3]], 12, 20)).toBe(""));
  test("what is not finite is left out", () =>
    expect(readTrend(makeSeries({ steps: [1, 2, 3], values: [1, "nan", 2], timestamps_ms: [0, 1, 2] }), 1, 0).points).toEqual([[1, 1], [3, 2]]));
  test("are read again when their run has moved on, and not more often than every few seconds", () => {
    const trend = readTrend(makeSeries({ name: "x" }), 5, 1000);
    expect(isStale(makeRun({ last_seq: 5 }), trend, "x", 99_000)).toBe(false);
    expect(isStale(makeRun({ last_seq: 6 }), trend, "x", 2000)).toBe(false);
    expect(isStale(makeRun({ last_seq: 6 }), trend, "x", 9000)).toBe(true);
    expect(isStale(makeRun({ last_seq: 5 }), trend, "y", 1000)).toBe(true);
  });
});

test("a shortcut of two keys wins over that of its second key", () => {
  const table = ["r", "g r", "m"].map((keys) => ({ keys, label: keys, run: () => undefined }));
  expect(findShortcut(table, "g", "r")?.keys).toBe("g r");
  expect(findShortcut(table, "", "r")?.keys).toBe("r");
  expect(findShortcut(table, "g", "m")?.keys).toBe("m");
  expect(findShortcut(table, "", "g")).toBeUndefined();
});

describe("rows in view", () => {
  const tops = measureRows([40, 100, 100, 40]);
  test("each begins where the one before ends", () => expect(tops).toEqual([0, 40, 140, 240, 280]));
  test.each([[-5, 0], [0, 0], [39, 0], [40, 1], [139, 1], [140, 2], [270, 3], [9999, 3]])("at %d is row %d", (at, row) => expect(findRow(tops, at)).toBe(row));
  test("an empty list has no row beyond the first", () => expect(findRow(measureRows([]), 50)).toBe(0));
});

test("a run is offered what can be done with its kind, in its state", () => {
  const labels = (given: Parameters<typeof makeRun>[0]): string[] => listActions(makeRun(given)).map(({ label }) => label);
  expect(labels({ state: "RUNNING" })).toContain("Cancel…");
  expect(labels({ state: "FAILED" })).toEqual(expect.arrayContaining(["Resume…", "Remove…"]));
  for (const kind of ["server", "prediction"] as const) {
    expect(labels({ state: "COMPLETED", kind })).not.toContain("Resume…"); // they have no checkpoints
    expect(labels({ state: "COMPLETED", kind })).toContain("Run again…");
  }
});
