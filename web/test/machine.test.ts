import { describe, expect, test } from "vitest";

import { placeBars, placeInTime, stateOf, timeTicks } from "../src/machine/lanes";
import type { LaneBar } from "../src/types";

const bar = (run_id: string, from_ms: number, to_ms: number | null): LaneBar => ({
  run_id, attempt: 1, from_ms, to_ms, reason: "", step: 0, cause: { id: "completed", fault: "", waits_for: [], next_attempt_ms: 0, values: {} },
});

test("bars that overlap stand in rows of their own; a free row is used again", () => {
  const { placed, numRows } = placeBars([bar("c", 20, null), bar("a", 0, 10), bar("b", 5, 15), bar("d", 16, 18)], 100);
  expect(placed.map((one) => [one.run_id, one.row])).toEqual([["a", 0], ["b", 1], ["d", 0], ["c", 0]]);
  expect(numRows).toBe(2);
  expect(placeBars([], 0).numRows).toBe(1);
});

describe("bars in time", () => {
  test("are cut at the edges", () => expect(placeInTime(bar("a", -50, 50), 0, 100, 100)).toEqual({ left: 0, width: 50 }));
  test("that still run end now", () => expect(placeInTime(bar("a", 50, null), 0, 100, 75)).toEqual({ left: 50, width: 25 }));
  test("outside are left out", () => expect([placeInTime(bar("a", -9, -1), 0, 100, 50), placeInTime(bar("a", 101, null), 0, 100, 200)]).toEqual([null, null]));
});

test("ticks are round times in the reader's zone, and not too many", () => {
  const hour = 3_600_000;
  expect(timeTicks(30 * 60_000, 6 * hour, 7, 0)).toEqual([1, 2, 3, 4, 5, 6].map((one) => one * hour));
  expect(timeTicks(0, 24 * hour, 4, -60)).toEqual([5, 11, 17, 23].map((one) => one * hour));
});

test("an attempt that neither completed nor was cancelled failed, unless it still runs", () => {
  const end = (id: string, to_ms: number | null) => stateOf({ ...bar("a", 0, to_ms), cause: { ...bar("a", 0, 1).cause, id } });
  expect([end("", null), end("completed", 1), end("cancelled", 1), end("killed", 1), end("of-a-newer-release", 1)])
    .toEqual(["RUNNING", "COMPLETED", "CANCELLED", "FAILED", "FAILED"]);
});
