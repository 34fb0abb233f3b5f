-- Up to where in a run's file a consumer was told of its events. What lies between there and `runs.event_offset` is
-- still to be told; so the commit that takes an event in also puts it into every outbox.
CREATE TABLE outbox_places (
    consumer TEXT NOT NULL,
    run_id   TEXT NOT NULL REFERENCES runs (run_id),
    seq      INTEGER NOT NULL,
    offset   INTEGER NOT NULL,
    PRIMARY KEY (consumer, run_id)
) STRICT, WITHOUT ROWID;

-- The last change of a run that a consumer was told of; runs that changed later are news.
CREATE TABLE outbox_cursors (
    consumer TEXT PRIMARY KEY,
    change   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Where else a run's lines are written, by wish of who submitted it; empty: nowhere else.
ALTER TABLE runs ADD COLUMN log_dir TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN event_log TEXT NOT NULL DEFAULT '';
CREATE INDEX runs_with_log_dir ON runs (log_dir) WHERE log_dir != '';

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, reason, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log
FROM runs;

-- Up to where a run was copied into each of its log files: its events, its output, and how many of its two job lines.
CREATE TABLE log_places (
    run_id        TEXT NOT NULL REFERENCES runs (run_id),
    copy          TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    offset        INTEGER NOT NULL,
    output_offset INTEGER NOT NULL,
    num_job_lines INTEGER NOT NULL,
    PRIMARY KEY (run_id, copy)
) STRICT, WITHOUT ROWID;
