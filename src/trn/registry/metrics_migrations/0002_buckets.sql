-- Points merged, so that a chart of any length reads about as many rows as it has pixels. See metric_buckets.py.
CREATE TABLE buckets (
    series_key   INTEGER NOT NULL,
    level        INTEGER NOT NULL,  -- a bucket is 2^level steps wide
    bucket       INTEGER NOT NULL,  -- its steps are those with step >> level = bucket
    step         INTEGER NOT NULL,  -- of the point that is shown for it: its last that is not a number, else its last
    value        REAL,
    timestamp_ms INTEGER NOT NULL,
    low          REAL,              -- NULL: none of its points is a number
    high         REAL,
    num_points   INTEGER NOT NULL,
    PRIMARY KEY (series_key, level, bucket)
) STRICT, WITHOUT ROWID;

ALTER TABLE series ADD COLUMN finest_level INTEGER;  -- of its buckets; NULL: too few points to need any
ALTER TABLE series ADD COLUMN built_to INTEGER NOT NULL DEFAULT 0;  -- all points below this step are in buckets

-- Series whose buckets have to be built from points that are there already.
CREATE TABLE unbuilt (series_key INTEGER PRIMARY KEY) STRICT;
INSERT INTO unbuilt SELECT series_key FROM series;

-- Points that a later attempt took back.
ALTER TABLE points ADD COLUMN attempt INTEGER;  -- NULL: by a release that did not say
CREATE TABLE discarded (
    series_key   INTEGER NOT NULL,
    attempt      INTEGER NOT NULL,
    step         INTEGER NOT NULL,
    value        REAL,
    timestamp_ms INTEGER NOT NULL,
    PRIMARY KEY (series_key, attempt, step)
) STRICT, WITHOUT ROWID;
ALTER TABLE series ADD COLUMN num_dropped INTEGER NOT NULL DEFAULT 0;  -- discarded points beyond what is kept
