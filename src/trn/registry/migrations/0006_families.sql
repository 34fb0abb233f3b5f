-- A run_id names a family: its first run has that id, further ones and resumes are `family.2`, `family.3`…
-- Runs from before this are families of their own.
ALTER TABLE runs ADD COLUMN family TEXT NOT NULL DEFAULT '';
UPDATE runs SET family = run_id;
-- Its number in the family. Only further ones are in the index: a family of one costs nothing.
ALTER TABLE runs ADD COLUMN member INTEGER NOT NULL DEFAULT 1;
CREATE UNIQUE INDEX runs_by_family ON runs (family, member) WHERE member > 1;

-- One for each logical submit, drawn by who asks and repeated after a lost reply; empty: none was given.
ALTER TABLE runs ADD COLUMN submission_id TEXT NOT NULL DEFAULT '';
CREATE UNIQUE INDEX runs_by_submission ON runs (submission_id) WHERE submission_id != '';

-- The step of the checkpoint that it began at.
ALTER TABLE runs ADD COLUMN start_step INTEGER NOT NULL DEFAULT 0;

-- Only a run that is alive or complete answers an equal submit.
DROP INDEX runs_by_digest;
CREATE INDEX runs_by_digest ON runs (digest, submitted_ms)
    WHERE state IN ('PENDING', 'DISPATCHING', 'RUNNING', 'COMPLETED');

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, reason, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env, family, member, submission_id, start_step
FROM runs;
