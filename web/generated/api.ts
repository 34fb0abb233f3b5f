/* Made by web/generate_types.py from the records of the gateway. Do not edit: a test fails when it is stale. */

export type Num = number | "-inf" | "inf" | "nan";

export interface AgainBody {
  overrides?: Record<string, unknown>;
  priority?: number | null;
  secret_env?: Record<string, string>;
}

/** A file that an event of a run named. Its name was written by the job and may contain anything. */
export interface Artifact {
  artifact_id: string;
  run_id: string;
  attempt: number;
  step: number;
  kind: string;
  name: string;
  media_type: string;
  size_bytes: number;
  sha256: string;
  created_ms: number;
  poster_id: string;
  state: string;
  is_present: boolean;
  reason: string;
  cause: Cause;
}

export interface ArtifactPage {
  artifacts: Artifact[];
  next_page_token: string;
}

/** One launch of a run. */
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

export interface CancelBody {
  reason?: string;
}

/** An id of the tables below, or of a newer release's. `values`: signal, step, error, pid… as the id needs them. */
export interface Cause {
  id: string;
  fault: string;
  waits_for: string[];
  next_attempt_ms: number;
  values: Record<string, unknown>;
}

/** From the code of `against` to that of the run. */
export interface CodeDifference {
  against: string;
  files: FileDifference[];
}

/** The code snapshot of a run. `snapshot` is empty where none was taken. */
export interface CodeFiles {
  snapshot: string;
  frozen_from: string;
  files: FileEntry[];
  git: GitState | null;
  size_bytes: number;
}

/** Only what differs; values in the order of the runs, null where a run does not have it. */
export interface ComparisonAnswer {
  runs: string[];
  config: Record<string, unknown[]>;
  code: Record<string, unknown[]>;
  packages: Record<string, unknown[]>;
  data: Record<string, unknown[]>;
  metrics: Record<string, (Num | null)[]>;
  divergences: Divergence[];
  num_common: number[];
  unknown: Record<string, string[]>;
}

/** A device of the daemon's machine and who holds it. */
export interface Device {
  device_id: string;
  kind: string;
  name: string;
  memory_mb: number;
  run_id: string;
  attempt: number;
  quarantine_reason: string;
}

/** Points that one attempt reported and a later one took back: it continued from an earlier step. */
export interface DiscardedSeries {
  run_id: string;
  name: string;
  attempt: number;
  steps: number[];
  values: Num[];
  timestamps_ms: number[];
  num_points: number;
}

/** The file system that holds the home. */
export interface Disk {
  total_bytes: number;
  free_bytes: number;
}

/** The first step at which a metric of two runs differs, and what differs between the two. */
export interface Divergence {
  runs: [string, string];
  metric: string;
  step: number;
  values: [Num, Num];
  num_equal: number;
  differing: Record<string, string[]>;
}

export interface DocumentsAnswer {
  documents: ("certificate" | "dataset" | "doctor" | "environment" | "job")[];
}

/** A variable that matters to a training and is not the same here and for the worker. */
export interface EnvDifference {
  name: string;
  is_in_caller: boolean;
  is_in_worker: boolean;
  worker_value: string;
}

/** Every answer from status 400 on. */
export interface ErrorAnswer {
  error: ErrorBody;
}

/** What happened. `faults` name each wrong field. */
export interface ErrorBody {
  code: string;
  message: string;
  faults?: Fault[];
}

/** Events in order, as in the run's file. Continue after `last_seq`. */
export interface EventPage {
  events: unknown[];
  last_seq: number;
  is_end: boolean;
}

/** `drifted`: at `step`, which was trained twice, a metric has two values. `exact`: every such step has equal ones. */
export interface Exactness {
  state: "certified" | "drifted" | "exact" | "unknown";
  step: number | null;
  text: string;
}

/** One thing that is wrong with a job or a request. What does not apply is empty. */
export interface Fault {
  text: string;
  path: string;
  kind: string;
  found: string;
  expected: string;
  hint: string;
}

/** `diff` is a unified diff; empty for files that are binary or too long. */
export interface FileDifference {
  path: string;
  status: string;
  diff: string;
  is_binary: boolean;
  is_cut: boolean;
}

export interface FileEntry {
  path: string;
  sha256: string;
  mode: number;
  size_bytes: number;
}

/** `low_ms` to `high_ms`: between the 10 % fastest and slowest of the past runs. */
export interface Forecast {
  finish_ms: number;
  low_ms: number;
  high_ms: number;
  basis: string;
}

/** Something that was removed, or in a dry run would be. `gone`: a run that was removed before. */
export interface Freed {
  kind: string;
  name: string;
  size_bytes: number;
}

export interface FreedAnswer {
  freed: Freed[];
}

/** Where the code came from. */
export interface GitState {
  commit: string;
  branch: string;
  is_dirty: boolean;
  diff: string;
  is_diff_cut: boolean;
}

/** The daemon: `up`, `silent` (it does not answer) or `down`, with what it says of itself; and the gateway. */
export interface Health {
  daemon: string;
  home: string;
  gateway_version: string;
  gateway_started_ms: number;
  daemon_version: string;
  daemon_started_ms: number;
  warnings: string[];
  runs_by_state: Record<string, number>;
  launcher: string;
  num_watchers: number;
}

/** What a submit would say. No faults: it would be taken. */
export interface JobCheck {
  faults: Fault[];
  code: string;
  reason: string;
  notes: string[];
  run: Run | null;
  plan: Record<string, unknown> | null;
  env_differences: EnvDifference[];
}

/** A job as it was written. Its fields are not checked here: a submit with `dry_run=1` does that. */
export interface JobDocument {
  config: Record<string, unknown>;
}

export interface JobText {
  text: string;
  format?: "json" | "toml" | "yaml";
}

export interface Lane {
  lane: string;
  bars: LaneBar[];
}

/** An attempt: from when to when it held the lane. `to_ms` is null while it lives. */
export interface LaneBar {
  run_id: string;
  attempt: number;
  from_ms: number;
  to_ms: number | null;
  step: number;
  cause: Cause;
  reason: string;
}

export interface Lanes {
  from_ms: number;
  to_ms: number;
  lanes: Lane[];
  queue: Queued[];
  is_cut: boolean;
  disk: Disk;
}

/** A run of a line of descent: its steps after `from_step` count, up to and with `to_step`; None: to its end. */
export interface LineagePart {
  run_id: string;
  from_step: number;
  to_step: number | null;
}

/** A line that has the text. `offset` is of its first byte; a long one is cut around the text. */
export interface LogMatch {
  offset: number;
  line: string;
}

export interface LogMatches {
  matches: LogMatch[];
  next_offset: number;
  is_end: boolean;
}

export interface LoginBody {
  token: string;
}

/** For one login within five minutes. */
export interface LoginToken {
  token: string;
  url: string;
}

/** What the daemon has to give, and how much of it is held. */
export interface Machine {
  devices: Device[];
  cpus: number;
  cpus_held: number;
  memory_mb: number;
  memory_mb_held: number;
}

/** By run. */
export interface ManyMetrics {
  runs: Record<string, RunSeries>;
}

/** `kind`: attempt, resume, kill, end, checkpoint, validation, best or promotion. */
export interface Marker {
  kind: string;
  step: number;
  time_ms: number;
  attempt: number;
  text: string;
  artifact_id: string;
}

export interface MarkersAnswer {
  markers: Marker[];
}

/** What a run holds while it runs, and where. What it needs in another pool is placed by that pool's executor. */
export interface Needs {
  devices: string[];
  gpus: number;
  cpus: number;
  memory_mb: number;
  pool: string;
}

export interface PromoteBody {
  model: string;
  action?: string;
  percent?: number;
  gate?: Record<string, unknown>;
  promotion_id?: string;
}

/** One change of what a name answers with. `previous` answered before it; `gate` has the gate's figures. */
export interface Promotion {
  name: string;
  run_id: string;
  number: number;
  action: string;
  state: string;
  version: VersionFacts | null;
  previous: VersionFacts | null;
  percent: number;
  by: string;
  asked_ms: number;
  ended_ms: number | null;
  cause: string;
  words: string;
  gate: Record<string, unknown> | null;
  promotion_id: string;
}

/** A run that waits: for what, and who holds that. */
export interface Queued {
  run_id: string;
  name: string;
  priority: number;
  submitted_ms: number;
  not_before_ms: number;
  needs: Needs;
  cause: Cause;
  reason: string;
  holders: string[];
}

export interface ResumeBody {
  base_dir?: string | null;
  code_dir?: string | null;
  snapshot?: string;
  frozen_from?: string;
  code_identity?: string;
  interpreter?: string | null;
  priority?: number;
  force_new?: boolean;
  is_import_tried?: boolean;
  log_dir?: string;
  event_log?: string;
  submission_id?: string;
  env?: Record<string, string>;
  secret_env?: Record<string, string>;
  overrides?: Record<string, unknown>;
  checkpoint?: string | null;
  is_forced?: boolean;
}

export interface RollbackBody {
  promotion_id?: string;
}

/** A run. `config` is null where it was not asked for. */
export interface Run {
  priority: number;
  snapshot: string;
  frozen_from: string;
  base_dir: string;
  interpreter: string;
  log_dir: string;
  event_log: string;
  submission_id: string;
  parent_run_id: string;
  start_step: number;
  run_id: string;
  digest: string;
  name: string;
  secret_env: string[];
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
  tags: Record<string, string>;
  change: number;
  family: string;
  newest_video: string;
  newest_sample: string;
  num_refused_artifacts: number;
  notes: string;
  kind: string;
  state: string;
  reason: string;
  cause: Cause;
  config: Record<string, unknown> | null;
  trainer: string;
  exactness: Exactness;
  serves: string;
  url: string;
}

/** A run with its config and what is around it. */
export interface RunDetails {
  run: Run;
  attempts: Attempt[];
  folder: string;
  family: string[];
  parents: string[];
  children: string[];
  exactness: Exactness;
  forecast: Forecast | null;
  forecast_reason: string;
  served: ServedModel | null;
  promotions: Promotion[];
}

export interface RunMetrics {
  series: Series[];
  discarded: DiscardedSeries[];
  lineage: LineagePart[];
}

/** The newest run first. `change`: open the stream after it, and nothing is missed. */
export interface RunPage {
  runs: Run[];
  next_page_token: string;
  change: number;
}

export interface RunSeries {
  series: Series[];
}

export type RunState = "CANCELLED" | "COMPLETED" | "DISPATCHING" | "FAILED" | "PENDING" | "RUNNING";

/** Points of one metric by step. With a width above 1 each stands for its bucket, and is the last point of it. */
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

/** A served name and its promotions, the newest first. */
export interface ServedDetails {
  served: ServedModel;
  promotions: Promotion[];
}

export interface ServedList {
  served: ServedModel[];
}

/** A served name: its newest server, and what that answers with as far as its events were read. */
export interface ServedModel {
  name: string;
  run_id: string;
  state: string;
  is_ready: boolean;
  url: string;
  bearer_file: string;
  live: VersionFacts | null;
  previous: VersionFacts | null;
  second: VersionFacts | null;
  second_is: string;
  percent: number;
  ready_ms: number;
  ready_attempt: number;
}

export interface SubmitBody {
  base_dir?: string | null;
  code_dir?: string | null;
  snapshot?: string;
  frozen_from?: string;
  code_identity?: string;
  interpreter?: string | null;
  priority?: number;
  force_new?: boolean;
  is_import_tried?: boolean;
  log_dir?: string;
  event_log?: string;
  submission_id?: string;
  env?: Record<string, string>;
  secret_env?: Record<string, string>;
  config: Record<string, unknown>;
}

/** What became of a submit. `existed`: an equal run answers, and nothing is trained again. */
export interface SubmitResult {
  run: Run;
  existed: boolean;
  notes: string[];
  env_differences: EnvDifference[];
}

export interface UpdateBody {
  name?: string | null;
  notes?: string | null;
  tags?: Record<string, string | null>;
}

/** Which model it is: what events, records and the headers of an answer say of a version. */
export interface VersionFacts {
  run_id: string;
  step: number;
  weights_hash: string;
  code_hash: string;
}
