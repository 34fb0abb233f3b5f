CREATE TABLE runs (
    run_id           TEXT PRIMARY KEY,
    digest           TEXT NOT NULL,
    state            TEXT NOT NULL,
    reason           TEXT NOT NULL,
    config           TEXT NOT NULL,
    name             TEXT NOT NULL,
    priority         INTEGER NOT NULL,
    parent_run_id    TEXT NOT NULL,
    snapshot         TEXT NOT NULL,
    base_dir         TEXT NOT NULL,
    interpreter      TEXT NOT NULL,
    is_cancel_wanted INTEGER NOT NULL DEFAULT 0,
    cancel_reason    TEXT NOT NULL DEFAULT '',
    submitted_ms     INTEGER NOT NULL,
    updated_ms       INTEGER NOT NULL,
    ended_ms         INTEGER,
    not_before_ms    INTEGER NOT NULL DEFAULT 0,
    attempt          INTEGER NOT NULL DEFAULT 0,
    max_attempts     INTEGER NOT NULL,
    num_interruptions INTEGER NOT NULL DEFAULT 0,
    step             INTEGER NOT NULL DEFAULT 0,
    end_step         INTEGER,
    last_seq         INTEGER NOT NULL DEFAULT 0,
    event_offset     INTEGER NOT NULL DEFAULT 0,
    metrics          TEXT NOT NULL DEFAULT '{}',
    devices          TEXT NOT NULL DEFAULT '[]',
    needs            TEXT NOT NULL,
    tags             TEXT NOT NULL,
    change           INTEGER NOT NULL
) STRICT;

-- One live or finished run for each digest: the newest is the one that an equal submit returns.
CREATE INDEX runs_by_digest ON runs (digest, submitted_ms);
-- What the dispatcher asks for: of each kind of needs the pending runs, the most urgent and oldest first.
CREATE INDEX runs_in_queue ON runs (needs, priority DESC, submitted_ms, run_id) WHERE state = 'PENDING';
-- Partial where that is enough: a submit writes a page for each index that the new run is in.
CREATE INDEX runs_in_backoff ON runs (not_before_ms) WHERE state = 'PENDING' AND not_before_ms > 0;
CREATE INDEX runs_live ON runs (state) WHERE state IN ('DISPATCHING', 'RUNNING');
CREATE INDEX runs_by_age ON runs (submitted_ms DESC, run_id DESC);
CREATE UNIQUE INDEX runs_by_change ON runs (change);

-- Runs without what was asked for, which may be large: for lists and watchers.
CREATE VIEW run_heads AS
SELECT run_id, digest, state, reason, '{}' AS config, name, priority, parent_run_id, snapshot, base_dir, interpreter,
       is_cancel_wanted, cancel_reason, submitted_ms, updated_ms, ended_ms, not_before_ms, attempt, max_attempts,
       num_interruptions, step, end_step, last_seq, event_offset, metrics, devices, needs, tags, change
FROM runs;

CREATE TABLE attempts (
    run_id            TEXT NOT NULL REFERENCES runs (run_id),
    number            INTEGER NOT NULL,
    launched_ms       INTEGER NOT NULL,
    ended_ms          INTEGER,
    boot_id           TEXT NOT NULL DEFAULT '',
    pid               INTEGER NOT NULL DEFAULT 0,
    start_ticks       INTEGER,
    exit_code         INTEGER,
    category          TEXT NOT NULL DEFAULT '',
    cause             TEXT NOT NULL DEFAULT '',
    last_heartbeat_ms INTEGER NOT NULL DEFAULT 0,
    step              INTEGER NOT NULL DEFAULT 0,
    devices           TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;

-- At most one live attempt of a run: the database itself refuses a second.
CREATE UNIQUE INDEX attempts_live ON attempts (run_id) WHERE ended_ms IS NULL;

-- Every so often, where in its file a run's event is: a replay begins near what it looks for.
CREATE TABLE event_places (
    run_id TEXT NOT NULL REFERENCES runs (run_id),
    seq    INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    PRIMARY KEY (run_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE slots (
    device_id         TEXT PRIMARY KEY,
    run_id            TEXT REFERENCES runs (run_id),
    attempt           INTEGER,
    since_ms          INTEGER,
    quarantine_reason TEXT NOT NULL DEFAULT ''
) STRICT, WITHOUT ROWID;

-- CPUs and memory that live attempts hold; a slot is a thing, these are amounts.
CREATE TABLE holdings (
    run_id    TEXT PRIMARY KEY REFERENCES runs (run_id),
    attempt   INTEGER NOT NULL,
    cpus      INTEGER NOT NULL,
    memory_mb INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
