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
SELECT series_key, attempt FROM series WHERE run_key = :run_key AND name = :name

-- name: add_series
INSERT INTO series (run_key, name, attempt) VALUES (:run_key, :name, :attempt) RETURNING series_key

-- name: add_point
INSERT OR REPLACE INTO points (series_key, step, value, timestamp_ms) VALUES (?, ?, ?, ?)

-- name: forget_points_from
DELETE FROM points WHERE series_key = :series_key AND step >= :step

-- name: move_series
UPDATE series SET attempt = :attempt WHERE series_key = :series_key

-- name: series
SELECT series_key, name FROM series
WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id)
  AND (:names = '[]' OR name IN (SELECT value FROM json_each(:names)))
ORDER BY name

-- name: extent
SELECT count(*) AS num_points, min(step) AS first_step, max(step) AS last_step
FROM points WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step

-- name: points
SELECT step, value, timestamp_ms
FROM points WHERE series_key = :series_key AND step BETWEEN :from_step AND :to_step ORDER BY step

-- name: thinned_points
WITH buckets AS (
    SELECT coalesce(max(step) FILTER (WHERE value IS NULL), max(step)) AS step, min(value) AS low, max(value) AS high
    FROM points
    WHERE series_key = :series_key AND step > :first_step AND step < :last_step
    GROUP BY CAST((step - :first_step - 1) * :num_buckets / (:last_step - :first_step - 1) AS INTEGER)
    UNION ALL
    SELECT step, value, value FROM points
    WHERE series_key = :series_key AND step IN (:first_step, :last_step)
)
SELECT points.step, points.value, points.timestamp_ms, buckets.low, buckets.high
FROM buckets JOIN points ON points.series_key = :series_key AND points.step = buckets.step
ORDER BY points.step

-- name: extremes
SELECT series.name,
       (SELECT step FROM points WHERE points.series_key = series.series_key AND abs(value) < 9e999
        ORDER BY value, step LIMIT 1) AS min_step,
       (SELECT step FROM points WHERE points.series_key = series.series_key AND abs(value) < 9e999
        ORDER BY value DESC, step LIMIT 1) AS max_step,
       (SELECT min(value) FROM points WHERE points.series_key = series.series_key AND abs(value) < 9e999) AS min_value,
       (SELECT max(value) FROM points WHERE points.series_key = series.series_key AND abs(value) < 9e999) AS max_value
FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id)
ORDER BY series.name

-- name: remove_points
DELETE FROM points WHERE series_key IN (
    SELECT series_key FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id))

-- name: remove_series
DELETE FROM series WHERE run_key = (SELECT run_key FROM runs WHERE run_id = :run_id)

-- name: remove_run
DELETE FROM runs WHERE run_id = :run_id

-- name: run_ids
SELECT run_id FROM runs
