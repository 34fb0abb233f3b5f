/* Small curves for the rows in view: fetched in one request, kept while their run does not move. */

import { signal } from "@preact/signals";

import { api } from "../api";
import { type Run, type Series, toNumber } from "../types";
import { mainMetric, readSpeed } from "./selection";

export interface Trend {
  name: string;
  points: readonly (readonly [number, number])[]; // step, value; without what is not finite
  speed: number | null; // steps per ms
  seq: number; // of the run when it was read
  readAt: number;
}

const trends = signal<ReadonlyMap<string, Trend>>(new Map());
export const trendOf = (runId: string): Trend | undefined => trends.value.get(runId);
export const speedOf = (runId: string): number | null => trends.value.get(runId)?.speed ?? null;

const MAX_POINTS = 48;
const MAX_RUNS = 60; // of one request
const AGE_MS = 4000; // how old the curve of a live run may get

/** Points that can be drawn, and the speed, of a series. */
export function readTrend(series: Series, seq: number, readAt: number): Trend {
  const points = series.steps
    .map((step, index) => [step, toNumber(series.values[index] ?? "nan")] as const)
    .filter(([, value]) => Number.isFinite(value));
  return { name: series.name, points, speed: readSpeed(series.steps, series.timestamps_ms), seq, readAt };
}

/** Whether the curve of a run must be read (again). */
export function isStale(run: Run, trend: Trend | undefined, name: string, nowMs: number): boolean {
  if (trend === undefined || trend.name !== name) return true;
  return trend.seq !== run.last_seq && nowMs - trend.readAt > AGE_MS;
}

let isBusy = false;

/** Reads what is missing for the runs in view. `chosen`: one metric for all; null: each run's main metric. */
export async function refreshTrends(visible: readonly Run[], chosen: string | null): Promise<void> {
  if (isBusy) return;
  const wanted = visible
    .map((run) => ({ run, name: chosen !== null && run.metrics[chosen] !== undefined ? chosen : mainMetric(run) }))
    .filter((one): one is { run: Run; name: string } =>
      one.name !== null && isStale(one.run, trends.peek().get(one.run.run_id), one.name, Date.now()))
    .slice(0, MAX_RUNS);
  if (wanted.length === 0) return;
  isBusy = true;
  try {
    const { runs } = await api.getManyMetrics({
      run: wanted.map(({ run }) => run.run_id),
      name: [...new Set(wanted.map(({ name }) => name))],
      max_points: MAX_POINTS,
    });
    const next = new Map(trends.peek());
    for (const { run, name } of wanted) {
      const series = runs[run.run_id]?.series.find((one) => one.name === name);
      const empty: Trend = { name, points: [], speed: null, seq: run.last_seq, readAt: Date.now() };
      next.set(run.run_id, series === undefined ? empty : readTrend(series, run.last_seq, Date.now()));
    }
    trends.value = next;
  } catch {
    // a trend is an extra: the table says what is wrong with the connection
  } finally {
    isBusy = false;
  }
}
