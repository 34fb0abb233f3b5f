-- How far each run's events file has been taken in: changes in the transaction that adds its points.
CREATE TABLE runs (
    run_key  INTEGER PRIMARY KEY,
    run_id   TEXT NOT NULL UNIQUE,
    offset   INTEGER NOT NULL DEFAULT 0,
    last_seq INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE series (
    series_key INTEGER PRIMARY KEY,
    run_key    INTEGER NOT NULL REFERENCES runs (run_key),
    name       TEXT NOT NULL,
    attempt    INTEGER NOT NULL,  -- the newest one that has a point
    UNIQUE (run_key, name)
) STRICT;

-- One point for a step. A value of NULL is "not a number", which SQLite has no word for; infinities it has.
CREATE TABLE points (
    series_key   INTEGER NOT NULL,
    step         INTEGER NOT NULL,
    value        REAL,
    timestamp_ms INTEGER NOT NULL,
    PRIMARY KEY (series_key, step)
) STRICT, WITHOUT ROWID;
