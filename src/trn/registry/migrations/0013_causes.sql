-- Causes are data: JSON with an id, whose fault, what it waits for, when the next attempt is, and values.
-- Of runs and attempts from before only the words are known; they are kept as the value `text`.
DROP VIEW run_heads;
ALTER TABLE runs RENAME COLUMN reason TO cause;
UPDATE runs SET cause = json_object('values', json_object('text', cause));
UPDATE attempts SET cause = json_object(
    'id', CASE WHEN cause_id IN ('SIGSEGV', 'SIGBUS', 'SIGABRT', 'SIGFPE', 'SIGILL') THEN 'crashed'
               WHEN cause_id LIKE 'SIG%' OR cause_id = 'signal' THEN 'killed'
               WHEN cause_id = 'cancelled' THEN 'stopped'
               ELSE cause_id END,
    'values', json_object('text', cause))
WHERE ended_ms IS NOT NULL;
UPDATE attempts SET cause = '{}' WHERE ended_ms IS NULL;
ALTER TABLE attempts DROP COLUMN cause_id;

CREATE VIEW run_heads AS
SELECT run_id, digest, state, cause, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env, family, member, submission_id, start_step, nonce
FROM runs;
