/* Bars of attempts on lanes over time: pure layout. */

import type { LaneBar } from "../types";

/** What became of an attempt, in the words for the state of a run. */
export function stateOf(bar: LaneBar): string {
  if (bar.to_ms === null) return "RUNNING";
  if (bar.cause.id === "completed") return "COMPLETED";
  return bar.cause.id === "cancelled" ? "CANCELLED" : "FAILED";
}

/** A bar with the row that it stands in: bars of one row do not overlap. */
export interface PlacedBar extends LaneBar {
  row: number;
}

/** Puts each bar into the first row that is free at its start. */
export function placeBars(bars: readonly LaneBar[], nowMs: number): { placed: PlacedBar[]; numRows: number } {
  const ends: number[] = [];
  const placed = [...bars]
    .sort((left, right) => left.from_ms - right.from_ms || left.run_id.localeCompare(right.run_id))
    .map((bar) => {
      const free = ends.findIndex((end) => end <= bar.from_ms);
      const row = free < 0 ? ends.length : free;
      ends[row] = bar.to_ms ?? Math.max(nowMs, bar.from_ms);
      return { ...bar, row };
    });
  return { placed, numRows: Math.max(1, ends.length) };
}

/** Where a bar is, in percent of the time that is shown; null: outside. */
export function placeInTime(bar: LaneBar, fromMs: number, toMs: number, nowMs: number): { left: number; width: number } | null {
  const start = Math.max(bar.from_ms, fromMs);
  const end = Math.min(bar.to_ms ?? nowMs, toMs);
  if (end < fromMs || start > toMs) return null;
  const percent = 100 / (toMs - fromMs);
  return { left: (start - fromMs) * percent, width: Math.max(0, end - start) * percent };
}

const MINUTE = 60_000;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880, 10080].map((minutes) => minutes * MINUTE);

/** Round times in the reader's zone, at most `count` of them. */
export function timeTicks(fromMs: number, toMs: number, count: number, offsetMinutes = new Date(fromMs).getTimezoneOffset()): number[] {
  const step = STEPS.find((one) => (toMs - fromMs) / one <= count) ?? STEPS.at(-1) ?? MINUTE;
  const offset = offsetMinutes * MINUTE;
  const ticks: number[] = [];
  for (let at = Math.ceil((fromMs - offset) / step) * step + offset; at <= toMs; at += step) ticks.push(at);
  return ticks;
}
