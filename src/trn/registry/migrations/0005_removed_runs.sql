-- Runs that were removed: their ids, and the change that did it, so that the count of changes never goes back.
CREATE TABLE removed_runs (
    run_id     TEXT PRIMARY KEY,
    removed_ms INTEGER NOT NULL,
    change     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE VIEW last_change AS
SELECT max(coalesce((SELECT max(change) FROM runs), 0), coalesce((SELECT max(change) FROM removed_runs), 0)) AS value;
