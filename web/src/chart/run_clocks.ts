/* When the attempts of runs ran and how long their epochs are: for axes other than the step. */

import { api, get } from "../api";
import type { RunClock } from "./axis";
import type { TrainerEvent } from "../types";

export const NO_CLOCK: RunClock = { stepsPerEpoch: null, attempts: [] };

const AT_ONCE = 4;

export async function readClock(runId: string, abort: AbortSignal): Promise<RunClock> {
  const { attempts } = await api.getRun(runId, abort);
  const spans = attempts.map((one) => ({ launchedMs: one.launched_ms, endedMs: one.ended_ms }));
  return { attempts: spans, stepsPerEpoch: await readStepsPerEpoch(runId, abort) };
}

/** The event at the start of training says it; null: nothing does. */
export async function readStepsPerEpoch(runId: string, abort: AbortSignal): Promise<number | null> {
  try {
    const { events } = await get<{ events: TrainerEvent[] }>(["runs", runId, "events"], { after_seq: 0, limit: 50 }, abort);
    return findStepsPerEpoch(events);
  } catch {
    return null;
  }
}

export function findStepsPerEpoch(events: readonly TrainerEvent[]): number | null {
  for (const event of events) {
    const found = event["steps_per_epoch"];
    if (typeof found === "number" && found > 0) return found;
  }
  return null;
}

/** Of all runs, a few at a time. */
export async function readClocks(runIds: readonly string[], abort: AbortSignal): Promise<Map<string, RunClock>> {
  const found = new Map<string, RunClock>();
  const left = [...runIds];
  const work = async (): Promise<void> => {
    for (let id = left.shift(); id !== undefined && !abort.aborted; id = left.shift()) {
      found.set(id, await readClock(id, abort).catch(() => NO_CLOCK));
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return found;
}
