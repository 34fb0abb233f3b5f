-- The folder that the run's snapshot was taken of: what an import would find there comes from the snapshot instead.
ALTER TABLE runs ADD COLUMN frozen_from TEXT NOT NULL DEFAULT '';

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, reason, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from
FROM runs;
