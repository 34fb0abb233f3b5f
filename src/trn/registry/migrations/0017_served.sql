-- What a run does: training, server or prediction.
ALTER TABLE runs ADD COLUMN kind TEXT NOT NULL DEFAULT 'training';

-- A served name and its newest server. `live`, `previous` and `second` are model versions as JSON, or null.
CREATE TABLE served (
    name          TEXT PRIMARY KEY,
    run_id        TEXT NOT NULL UNIQUE REFERENCES runs (run_id),
    url           TEXT NOT NULL DEFAULT '',
    bearer_file   TEXT NOT NULL DEFAULT '',
    live          TEXT NOT NULL DEFAULT 'null',
    previous      TEXT NOT NULL DEFAULT 'null',
    second        TEXT NOT NULL DEFAULT 'null',
    second_is     TEXT NOT NULL DEFAULT '',
    percent       REAL NOT NULL DEFAULT 0,
    ready_ms      INTEGER NOT NULL DEFAULT 0,
    ready_attempt INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- Every change of what a name answers with, also those of its earlier servers.
CREATE TABLE promotions (
    name         TEXT NOT NULL,
    number       INTEGER NOT NULL,
    run_id       TEXT NOT NULL,
    action       TEXT NOT NULL,
    state        TEXT NOT NULL,
    version      TEXT NOT NULL,
    previous     TEXT NOT NULL DEFAULT 'null',
    percent      REAL NOT NULL,
    gate_spec    TEXT NOT NULL,
    "by"         TEXT NOT NULL,
    asked_ms     INTEGER NOT NULL,
    ended_ms     INTEGER,
    cause        TEXT NOT NULL DEFAULT '',
    words        TEXT NOT NULL DEFAULT '',
    gate         TEXT NOT NULL DEFAULT '{}',
    promotion_id TEXT NOT NULL,
    PRIMARY KEY (name, number)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX promotions_by_id ON promotions (promotion_id) WHERE promotion_id != '';
CREATE INDEX promotions_wanted ON promotions (run_id) WHERE state = 'wanted';

-- A server asked for the next training run, once for each number.
CREATE TABLE due_feedback (
    run_id     TEXT NOT NULL,
    number     INTEGER NOT NULL,
    rows       INTEGER NOT NULL,
    files      TEXT NOT NULL,
    reason     TEXT NOT NULL,
    version    TEXT NOT NULL,
    figures    TEXT NOT NULL,
    at_ms      INTEGER NOT NULL,
    child      TEXT NOT NULL DEFAULT '',
    fault      TEXT NOT NULL DEFAULT '',
    is_settled INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX due_feedback_open ON due_feedback (run_id) WHERE is_settled = 0;

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, cause, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env, family, member, submission_id, start_step, nonce, options,
       newest_video, newest_sample, num_refused_artifacts, notes, kind
FROM runs;
