-- name: heads
SELECT run_id, state, cause, runs.name, priority, parent_run_id, attempt, max_attempts, step, end_step, submitted_ms,
       updated_ms, ended_ms, metrics, devices, tags, change, family, member, start_step, notes, kind,
       coalesce(served.name, ''), coalesce(served.url, ''), coalesce(served.live, 'null'),
       coalesce(served.ready_attempt, 0) > 0 AND served.ready_attempt = attempt
FROM runs LEFT JOIN served USING (run_id)
WHERE (:state_words = '' OR instr(:state_words, '|' || state || '|'))
  AND (:name = '' OR instr(runs.name, :name))
  AND submitted_ms >= :since_ms
  AND (:tag = '' OR EXISTS (SELECT 1 FROM json_each(tags) WHERE key = :tag AND (:is_any OR value = :tag_value)))
ORDER BY submitted_ms DESC, run_id DESC LIMIT :limit

-- name: num_runs
SELECT count(*) FROM runs
WHERE (:state_words = '' OR instr(:state_words, '|' || state || '|'))
  AND (:name = '' OR instr(name, :name))
  AND submitted_ms >= :since_ms
  AND (:tag = '' OR EXISTS (SELECT 1 FROM json_each(tags) WHERE key = :tag AND (:is_any OR value = :tag_value)))

-- name: last_change
SELECT coalesce(max(change), 0) FROM runs

-- name: ids_with_prefix
SELECT run_id, state, name FROM runs
WHERE run_id >= :prefix AND run_id < :prefix || char(1114111)
ORDER BY submitted_ms DESC LIMIT :limit

-- name: hyperparams
SELECT run_id, json_extract(config, '$.hyperparams') FROM runs
WHERE run_id IN (SELECT value FROM json_each(:run_ids)) AND json_type(config, '$.hyperparams') = 'object'

-- name: served_names
SELECT name, run_id FROM served WHERE name >= :prefix AND name < :prefix || char(1114111) ORDER BY name LIMIT :limit
