/* Records for tests: everything has a value, and a test names what it is about. */

import type { Run, Series } from "../src/types";

export function makeRun(given: Partial<Run> = {}): Run {
  return {
    run_id: "run", state: "RUNNING", reason: "", cause: { id: "", fault: "", waits_for: [], next_attempt_ms: 0, values: {} },
    config: null, digest: "", name: "", family: "", parent_run_id: "", start_step: 0, priority: 0, snapshot: "", frozen_from: "",
    base_dir: "", interpreter: "", stop_reason: "", is_cancel_wanted: false, cancel_reason: "", submitted_ms: 0, updated_ms: 0,
    ended_ms: null, not_before_ms: 0, attempt: 1, max_attempts: 3, step: 0, end_step: null, last_seq: 0, metrics: {}, devices: [],
    needs: { devices: [], gpus: 0, cpus: 1, memory_mb: 0, pool: "local" }, tags: {}, change: 0,
    log_dir: "", event_log: "", submission_id: "", secret_env: [], newest_video: "", newest_sample: "", num_refused_artifacts: 0, notes: "",
    kind: "training", serves: "", url: "", trainer: "", exactness: { state: "unknown", step: null, text: "" }, ...given,
  };
}

export function makeSeries(given: Partial<Series> = {}): Series {
  return { name: "train/loss", steps: [], values: [], mins: [], maxs: [], counts: [], timestamps_ms: [], num_points: 0, width: 1, ...given };
}
