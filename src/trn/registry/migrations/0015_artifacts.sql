-- Files that an event named. A row is made with the event, in the same transaction; the file is looked at afterwards.
CREATE TABLE artifacts (
    artifact_id TEXT PRIMARY KEY,
    run_id      TEXT NOT NULL REFERENCES runs (run_id),
    seq         INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    step        INTEGER NOT NULL,
    kind        TEXT NOT NULL,
    name        TEXT NOT NULL,
    path        TEXT NOT NULL,
    media_type  TEXT NOT NULL,
    size_bytes  INTEGER NOT NULL DEFAULT 0,
    sha256      TEXT NOT NULL DEFAULT '',
    stamp       TEXT NOT NULL DEFAULT '',
    created_ms  INTEGER NOT NULL,
    poster_id   TEXT NOT NULL DEFAULT '',
    state       TEXT NOT NULL DEFAULT 'checking',
    cause       TEXT NOT NULL DEFAULT '{}'
) STRICT, WITHOUT ROWID;

CREATE INDEX artifacts_of_run ON artifacts (run_id, seq, artifact_id);
CREATE INDEX artifacts_by_kind ON artifacts (run_id, state, kind, seq);
CREATE INDEX artifacts_by_path ON artifacts (run_id, path);
-- What a daemon that starts has still to look at.
CREATE INDEX artifacts_unchecked ON artifacts (run_id, seq) WHERE state = 'checking';

-- The newest ones that are present, and how many were refused.
ALTER TABLE runs ADD COLUMN newest_video TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN newest_sample TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN num_refused_artifacts INTEGER NOT NULL DEFAULT 0;

DROP VIEW run_heads;
CREATE VIEW run_heads AS
SELECT run_id, digest, state, cause, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change, log_dir,
       event_log, frozen_from, stop_reason, secret_env, family, member, submission_id, start_step, nonce, options,
       newest_video, newest_sample, num_refused_artifacts
FROM runs;
