/* What the HTTP API sends. Names are those of the records behind it (docs/http-api.md); times are ms since 1970. */

/** A number of a metric. JSON has none that is not finite, so those travel as words (docs/decisions/0005). */
export type Num = number | "nan" | "inf" | "-inf" | "NaN" | "Infinity" | "-Infinity";

export type State = "PENDING" | "DISPATCHING" | "RUNNING" | "COMPLETED" | "FAILED" | "CANCELLED";

/** A newer daemon may have states that this page does not know. */
export type AnyState = State | (string & {});

export interface Cause {
  id: string;
  fault: string;
  waits_for: string[];
  next_attempt_ms: number;
  values: Record<string, unknown>;
}

export interface Needs {
  devices: string[];
  gpus: number;
  cpus: number;
  memory_mb: number;
}

export interface Exactness {
  state: "certified" | "exact" | "drifted" | "unknown" | (string & {});
  step: number | null;
  text: string;
}

export interface Run {
  run_id: string;
  state: AnyState;
  reason: string;
  cause: Cause;
  config: Record<string, unknown> | null;
  digest: string;
  name: string;
  family: string;
  parent_run_id: string;
  start_step: number;
  priority: number;
  snapshot: string;
  frozen_from: string;
  base_dir: string;
  interpreter: string;
  stop_reason: string;
  is_cancel_wanted: boolean;
  cancel_reason: string;
  submitted_ms: number;
  updated_ms: number;
  ended_ms: number | null;
  not_before_ms: number;
  attempt: number;
  max_attempts: number;
  step: number;
  end_step: number | null;
  last_seq: number;
  metrics: Record<string, Num>;
  devices: string[];
  needs: Needs;
  tags: Record<string, string>; // a job's `group` is the tag of that name
  change: number;
  // Given where the gateway knows them.
  notes?: string;
  trainer?: string;
  started_ms?: number | null;
  exactness?: Exactness | null;
}

export interface Attempt {
  number: number;
  launched_ms: number;
  ended_ms: number | null;
  pid: number;
  exit_code: number | null;
  category: string;
  cause: Cause;
  reason: string;
  last_heartbeat_ms: number;
  step: number;
  devices: string[];
}

export interface Forecast {
  finish_ms: number;
  low_ms: number;
  high_ms: number;
  basis: string;
}

export interface RunDetails {
  run: Run;
  attempts: Attempt[];
  folder: string;
  family: string[];
  parents: string[];
  children: string[];
  forecast: Forecast | null;
  exactness: Exactness;
}

export interface RunPage {
  runs: Run[];
  next_page_token: string;
  change: number; // the registry's change counter as of this page
}

/** Points of one metric. `width` 1: raw points, and `mins`, `maxs`, `counts` are empty. */
export interface Series {
  name: string;
  steps: number[];
  values: Num[];
  mins: Num[];
  maxs: Num[];
  counts: number[];
  timestamps_ms: number[];
  num_points: number;
  width: number;
}

export interface LineagePart {
  run_id: string;
  from_step: number;
  to_step: number | null;
}

export interface DiscardedSeries {
  name: string;
  attempt: number;
  steps: number[];
  values: Num[];
}

export interface RunMetrics {
  series: Series[];
  lineage: LineagePart[];
  discarded: DiscardedSeries[];
}

export interface ManyMetrics {
  runs: Record<string, { series: Series[] }>;
}

export interface Marker {
  kind: string;
  step: number;
  time_ms: number;
  attempt: number;
  text: string;
  artifact_id: string | null;
}

export interface Artifact {
  artifact_id: string;
  run_id: string;
  attempt: number;
  step: number | null;
  kind: "checkpoint" | "sample" | "video" | "file" | (string & {});
  media_type: string;
  name: string;
  size_bytes: number;
  sha256: string;
  created_ms: number;
  poster_id: string | null;
  is_present: boolean;
}

export interface ArtifactPage {
  artifacts: Artifact[];
  next_page_token: string;
}

/** An event of a run, as in its events file: `event`, `seq`, `timestamp_ms` and the event's own fields. */
export interface TrainerEvent {
  event: string;
  seq: number;
  attempt: number;
  timestamp_ms: number;
  step?: number;
  [field: string]: unknown;
}

export interface Fault {
  path: string;
  kind: string;
  text: string;
  found?: unknown;
  expected?: string;
  hint?: string;
}

export interface Device {
  device_id: string;
  kind: string;
  name: string;
  memory_mb: number;
  run_id: string;
  attempt: number;
  quarantine_reason: string;
}

export interface Machine {
  devices: Device[];
  cpus: number;
  cpus_held: number;
  memory_mb: number;
  memory_mb_held: number;
}

/** "silent": a daemon runs and does not answer. Without one, most fields are missing or empty. */
export interface Health {
  daemon: "up" | "down" | "silent" | (string & {});
  daemon_version?: string;
  warnings?: string[];
  runs_by_state?: Record<string, number>;
  launcher?: string;
  num_watchers?: number;
  gateway_version?: string;
  gateway_started_ms?: number;
  home?: string;
}

export interface SubmitResult {
  run: Run;
  existed: boolean;
  notes: string[];
  env_differences: { name: string; is_in_caller: boolean; is_in_worker: boolean; worker_value: string }[];
}

/** What a submit would say. No faults: it would be accepted. */
export interface JobCheck {
  faults: Fault[];
  code: string;
  reason: string;
  notes: string[];
  run: Run | null;
  plan: Record<string, unknown> | null;
}

export interface Freed {
  kind: string;
  name: string;
  size_bytes: number;
}

const TERMINAL = new Set<string>(["COMPLETED", "FAILED", "CANCELLED"]);

export const isTerminal = (run: Pick<Run, "state" | "ended_ms">): boolean =>
  TERMINAL.has(run.state) || run.ended_ms !== null;

/** The number behind a word. */
export const toNumber = (value: Num): number =>
  typeof value === "number" ? value : Number(value.replace(/inf$/, "Infinity"));
