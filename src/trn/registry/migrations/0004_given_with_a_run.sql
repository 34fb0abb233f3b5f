-- Why a callback ended the run before its last step; empty: none did.
ALTER TABLE runs ADD COLUMN stop_reason TEXT NOT NULL DEFAULT '';
-- Names of the variables whose values its worker is given and nobody records: a JSON list.
ALTER TABLE runs ADD COLUMN secret_env TEXT NOT NULL DEFAULT '[]';

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, reason, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env
FROM runs;
