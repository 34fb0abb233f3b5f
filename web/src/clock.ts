/* The time of the machine that the runs are on: the browser may be on another one, and its clock may be wrong. */

const TOLERATED_MS = 5000; // the header `Date` has whole seconds, and took its time to come

let aheadMs = 0; // of the browser's clock

/** Takes the header `Date` of an answer. */
export function noteTime(date: string | null, nowMs: number = Date.now()): void {
  const found = Date.parse(date ?? "") - nowMs;
  if (Number.isNaN(found) || Math.abs(found - aheadMs) < TOLERATED_MS) return;
  aheadMs = Math.abs(found) < TOLERATED_MS ? 0 : found;
}

export const machineNow = (): number => Date.now() + aheadMs;
