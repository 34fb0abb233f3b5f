/* What the HTTP API sends. The records are generated from the gateway's own (web/generate_types.py); times are ms since
   1970. What is not a record of the API is here. */

import type { Num, Run, VersionFacts } from "../generated/api";

export type {
  Artifact, ArtifactPage, Attempt, Cause, Device, DiscardedSeries, Exactness, Fault, Forecast, Freed, Health, JobCheck, Lane,
  LaneBar, Lanes, LineagePart, Machine, ManyMetrics, Marker, Needs, Num, Promotion, Queued, Run, RunDetails, RunMetrics, RunPage, Series,
  SubmitResult,
} from "../generated/api";

/** An event of a run, as in its events file: `event`, `seq`, `timestamp_ms` and the event's own fields. */
export interface TrainerEvent {
  event: string;
  seq: number;
  attempt: number;
  timestamp_ms: number;
  step?: number;
  [field: string]: unknown;
}

/** Where a run's code and relative paths come from: a check of its job goes by the same as its next run. */
export const originOf = ({ base_dir, snapshot, frozen_from, interpreter }: Run) => ({ base_dir, snapshot, frozen_from, interpreter });

/** A model version, as it is called everywhere. */
export const versionLabel = (version: VersionFacts | null | undefined): string => (version ? `${version.run_id}@${version.step}` : "");

const TERMINAL = new Set<string>(["COMPLETED", "FAILED", "CANCELLED"]);

export const isTerminal = (run: Pick<Run, "state" | "ended_ms">): boolean =>
  TERMINAL.has(run.state) || run.ended_ms !== null;

/** The number behind a word: JSON has none that is not finite (docs/decisions/0005). */
export const toNumber = (value: Num): number =>
  typeof value === "number" ? value : Number(value.replace(/inf$/, "Infinity"));
