-- name: place
SELECT offset, last_seq FROM runs WHERE run_id = :run_id

-- name: behind
SELECT ended.run_id
FROM (SELECT run_id, state, event_offset FROM registry.runs ORDER BY change DESC LIMIT :limit) AS ended
LEFT JOIN main.runs AS stored ON stored.run_id = ended.run_id
WHERE ended.state IN ('COMPLETED', 'FAILED', 'CANCELLED') AND ended.event_offset > coalesce(stored.offset, 0)

-- name: add_run
INSERT INTO runs (run_id) VALUES (:run_id) ON CONFLICT DO NOTHING

-- name: run
SELECT run_key, last_seq FROM runs WHERE run_id = :run_id

-- name: move_place
UPDATE runs SET offset = :offset, last_seq = :last_seq WHERE run_key = :run_key

-- name: rewind
UPDATE runs SET offset = :offset, last_seq = :last_seq WHERE run_id = :run_id

-- name: one_series
SELECT series_key, attempt, finest_level, built_to FROM series WHERE run_key = :run_key AND name = :name

-- name: add_series
INSERT INTO series (run_key, name, attempt) VALUES (:run_key, :name, :attempt) RETURNING series_key

-- name: add_point
INSERT OR REPLACE INTO points (series_key, step, value, timestamp_ms, attempt) VALUES (?, ?, ?, ?, ?)

-- name: move_series
UPDATE series SET attempt = :attempt WHERE series_key = :series_key

-- name: series
SELECT series_key, name, num_dropped, finest_level, built_to FROM series
WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id)
  AND (:names = '[]' OR name IN (SELECT value FROM json_each(:names)))
ORDER BY name

-- name: extent
SELECT (SELECT min(step) FROM points
        WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step) AS first_step,
       (SELECT max(step) FROM points
        WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step) AS last_step

-- name: num_points
WITH spans AS (
    SELECT json_extract(value, '$[0]') AS level, json_extract(value, '$[1]') AS first, json_extract(value, '$[2]') AS last
    FROM json_each(:spans)
)
SELECT (SELECT coalesce(sum(num_points), 0) FROM spans CROSS JOIN buckets
        ON series_key = :series_key AND buckets.level = spans.level AND bucket >= first AND bucket < last)
     + (SELECT count(*) FROM spans CROSS JOIN points
        ON spans.level = 0 AND series_key = :series_key AND step >= first AND step < last) AS num_points

-- name: points
SELECT step, value, timestamp_ms
FROM points WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step ORDER BY step

-- name: buckets
SELECT step, value, timestamp_ms, low, high, num_points
FROM buckets WHERE series_key = :series_key AND level = :level AND bucket >= :begin AND bucket < :end ORDER BY bucket

-- name: merged
WITH spans AS (
    SELECT json_extract(value, '$[0]') AS level, json_extract(value, '$[1]') AS first, json_extract(value, '$[2]') AS last
    FROM json_each(:spans)
), parts AS (
    SELECT step, value IS NULL AS is_nan, low, high, num_points FROM spans CROSS JOIN buckets
    ON series_key = :series_key AND buckets.level = spans.level AND bucket >= first AND bucket < last
    UNION ALL
    SELECT step, value IS NULL, value, value, 1 FROM spans CROSS JOIN points
    ON spans.level = 0 AND series_key = :series_key AND step >= first AND step < last
), merged AS (
    SELECT coalesce(max(step) FILTER (WHERE is_nan), max(step)) AS step,
           min(low) AS low, max(high) AS high, sum(num_points) AS num_points
    FROM parts GROUP BY step >> :level
)
SELECT points.step, points.value, points.timestamp_ms, merged.low, merged.high, merged.num_points
FROM merged JOIN points ON points.series_key = :series_key AND points.step = merged.step
ORDER BY points.step

-- name: build_from_points
INSERT OR REPLACE INTO buckets (series_key, level, bucket, step, value, timestamp_ms, low, high, num_points)
SELECT :series_key, :level, points.step >> :level, points.step, points.value, points.timestamp_ms, low, high, num_points
FROM (
    SELECT coalesce(max(step) FILTER (WHERE value IS NULL), max(step)) AS step,
           min(value) AS low, max(value) AS high, count(*) AS num_points
    FROM points WHERE series_key = :series_key AND step >= :begin AND step < :end GROUP BY step >> :level
) AS merged JOIN points ON points.series_key = :series_key AND points.step = merged.step

-- name: build_from_buckets
INSERT OR REPLACE INTO buckets (series_key, level, bucket, step, value, timestamp_ms, low, high, num_points)
SELECT :series_key, :level, merged.step >> :level, merged.step, finer.value, finer.timestamp_ms,
       merged.low, merged.high, merged.num_points
FROM (
    SELECT coalesce(max(step) FILTER (WHERE value IS NULL), max(step)) AS step,
           min(low) AS low, max(high) AS high, sum(num_points) AS num_points
    FROM buckets WHERE series_key = :series_key AND level = :finer AND bucket >= :begin AND bucket < :end
    GROUP BY step >> :level
) AS merged JOIN buckets AS finer
ON finer.series_key = :series_key AND finer.level = :finer AND finer.bucket = merged.step >> :finer

-- name: most_points
SELECT max(num_points) FROM buckets
WHERE series_key = :series_key AND level = :level AND bucket >= :begin AND bucket < :end

-- name: first_points
SELECT count(*) AS num_points, min(step) AS first_step, max(step) AS last_step
FROM (SELECT step FROM points WHERE series_key = :series_key ORDER BY step LIMIT :limit)

-- name: step_after
SELECT step FROM points WHERE series_key = :series_key AND step >= :begin ORDER BY step LIMIT 1 OFFSET :num_points

-- name: note_built
UPDATE series SET finest_level = :finest_level, built_to = :built_to WHERE series_key = :series_key

-- name: remove_buckets_from
DELETE FROM buckets WHERE series_key = ? AND level = ? AND bucket >= ?

-- name: remove_buckets_of
DELETE FROM buckets WHERE series_key = :series_key

-- name: add_unbuilt
INSERT INTO unbuilt (series_key) VALUES (:series_key) ON CONFLICT DO NOTHING

-- name: next_unbuilt
SELECT series_key, finest_level, built_to,
       (SELECT max(step) FROM points WHERE points.series_key = unbuilt.series_key) AS last_step
FROM unbuilt JOIN series USING (series_key) LIMIT :limit

-- name: remove_unbuilt
DELETE FROM unbuilt WHERE series_key = :series_key

-- name: discard_points
INSERT OR REPLACE INTO discarded (series_key, attempt, step, value, timestamp_ms)
SELECT series_key, coalesce(attempt, :attempt), step, value, timestamp_ms
FROM points WHERE series_key = :series_key AND step >= :step AND (step = :kept_step OR step < coalesce(
    (SELECT step FROM points WHERE series_key = :series_key AND step >= :step ORDER BY step LIMIT 1 OFFSET :limit),
    9223372036854775807))

-- name: remove_points_from
DELETE FROM points WHERE series_key = :series_key AND step >= :step

-- name: remove_excess
DELETE FROM discarded WHERE series_key = :series_key AND (attempt, step) IN (
    SELECT attempt, step FROM discarded WHERE series_key = :series_key AND step <> :kept_step
    ORDER BY attempt, step DESC
    LIMIT max((SELECT count(*) FROM discarded WHERE series_key = :series_key) - :limit, 0))

-- name: note_dropped
UPDATE series SET num_dropped = num_dropped + :num_dropped WHERE series_key = :series_key

-- name: discarded
SELECT attempt, step, value, timestamp_ms FROM discarded
WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step ORDER BY attempt, step

-- name: repeated_steps
WITH taken AS (
    SELECT series_key, step, discarded.value FROM json_each(:keys) AS keys CROSS JOIN discarded
    ON series_key = keys.value
), reported AS (
    SELECT series_key, step, value FROM taken
    UNION ALL
    SELECT points.series_key, points.step, points.value
    FROM (SELECT DISTINCT series_key, step FROM taken) AS steps CROSS JOIN points
    ON points.series_key = steps.series_key AND points.step = steps.step
), repeated AS (
    SELECT step, count(value) NOT IN (0, count(*)) OR min(value) <> max(value) AS is_drifted
    FROM reported GROUP BY series_key, step HAVING count(*) > 1
)
SELECT count(DISTINCT step) AS num_steps, min(step) FILTER (WHERE is_drifted) AS drift_step FROM repeated

-- name: values_at
SELECT value FROM (
    SELECT value, attempt, 0 AS is_newest FROM discarded WHERE series_key = :series_key AND step = :step
    UNION ALL
    SELECT value, attempt, 1 FROM points WHERE series_key = :series_key AND step = :step)
ORDER BY is_newest, attempt

-- name: parts
WITH spans AS (
    SELECT json_extract(value, '$[0]') AS level, json_extract(value, '$[1]') AS first, json_extract(value, '$[2]') AS last
    FROM json_each(:spans)
)
SELECT buckets.level, bucket AS place, low, high, bucket << buckets.level AS step FROM spans CROSS JOIN buckets
ON series_key = :series_key AND buckets.level = spans.level AND bucket >= first AND bucket < last AND low IS NOT NULL
UNION ALL
SELECT 0, step, value, value, step FROM spans CROSS JOIN points
ON spans.level = 0 AND series_key = :series_key AND step >= first AND step < last AND value IS NOT NULL
ORDER BY step

-- name: extremes
WITH finite AS (
    SELECT step, value FROM points
    WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step AND abs(value) < 9e999
)
SELECT (SELECT min(value) FROM finite) AS min_value,
       (SELECT step FROM finite ORDER BY value, step LIMIT 1) AS min_step,
       (SELECT max(value) FROM finite) AS max_value,
       (SELECT step FROM finite ORDER BY value DESC, step LIMIT 1) AS max_step

-- name: common_series
SELECT mine.name, mine.series_key AS one_key, theirs.series_key AS other_key
FROM runs AS own
JOIN runs AS beside ON beside.run_id = :other
JOIN series AS mine ON mine.run_key = own.run_key
JOIN series AS theirs ON theirs.run_key = beside.run_key AND theirs.name = mine.name
WHERE own.run_id = :one
ORDER BY mine.name

-- name: first_difference
SELECT mine.step, mine.value AS one, theirs.value AS other
FROM points AS mine
CROSS JOIN points AS theirs ON theirs.series_key = :other AND theirs.step = mine.step
WHERE mine.series_key = :one AND mine.step < :before AND mine.value IS NOT theirs.value
ORDER BY mine.step
LIMIT 1

-- name: num_common_before
SELECT count(*)
FROM points AS mine
CROSS JOIN points AS theirs ON theirs.series_key = :other AND theirs.step = mine.step
WHERE mine.series_key = :one AND mine.step < :before

-- name: num_common
WITH pairs AS MATERIALIZED (
    SELECT json_extract(value, '$.one') AS one, json_extract(value, '$.other') AS other FROM json_each(:pairs)
)
SELECT count(DISTINCT mine.step)
FROM pairs
CROSS JOIN points AS mine ON mine.series_key = pairs.one
CROSS JOIN points AS theirs ON theirs.series_key = pairs.other AND theirs.step = mine.step

-- name: remove_run_points
DELETE FROM points WHERE series_key IN (
    SELECT series_key FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id))

-- name: remove_run_buckets
DELETE FROM buckets WHERE series_key IN (
    SELECT series_key FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id))

-- name: remove_run_discarded
DELETE FROM discarded WHERE series_key IN (
    SELECT series_key FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id))

-- name: remove_run_unbuilt
DELETE FROM unbuilt WHERE series_key IN (
    SELECT series_key FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id))

-- name: remove_run_series
DELETE FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id)

-- name: remove_run
DELETE FROM runs WHERE run_id = :run_id

-- name: run_ids
SELECT run_id FROM runs
