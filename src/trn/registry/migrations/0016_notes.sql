-- What people write about a run.
ALTER TABLE runs ADD COLUMN notes TEXT NOT NULL DEFAULT '';

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, cause, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env, family, member, submission_id, start_step, nonce, options,
       newest_video, newest_sample, num_refused_artifacts, notes
FROM runs;
