-- name: last_change
SELECT value FROM last_change

-- name: keep_change
UPDATE change_counter SET value = :change

-- name: may_answer
SELECT EXISTS (SELECT 1 FROM runs INDEXED BY runs_by_digest
               WHERE digest = :digest AND state IN ('PENDING', 'DISPATCHING', 'RUNNING', 'COMPLETED')
                 AND (state = 'COMPLETED' OR NOT is_cancel_wanted))
    OR (:submission_id != '' AND EXISTS (
        SELECT 1 FROM runs WHERE submission_id = :submission_id AND submission_id != ''))
    OR EXISTS (SELECT 1 FROM runs INDEXED BY runs_by_family WHERE family = :family AND member > 1)
    OR EXISTS (SELECT 1 FROM removed_runs WHERE family = :family)

-- name: add_run
INSERT INTO runs (run_id, digest, state, cause, config, name, priority, parent_run_id, snapshot, base_dir,
                  interpreter, submitted_ms, updated_ms, max_attempts, needs, tags, change, log_dir, event_log,
                  frozen_from, secret_env, family, member, submission_id, start_step, nonce, options, kind)
VALUES (:run_id, :digest, :state, :cause, :config, :name, :priority, :parent_run_id, :snapshot, :base_dir,
        :interpreter, :submitted_ms, :updated_ms, :max_attempts, :needs, :tags, :change, :log_dir, :event_log,
        :frozen_from, :secret_env, :family, :member, :submission_id, :start_step, :nonce, :options, :kind)
ON CONFLICT (run_id) DO NOTHING

-- name: run_of_submission
SELECT * FROM runs WHERE submission_id = :submission_id AND submission_id != ''

-- name: answers_to_digest
SELECT * FROM runs INDEXED BY runs_by_digest
WHERE digest = :digest AND state IN ('PENDING', 'DISPATCHING', 'RUNNING', 'COMPLETED')
  AND (state = 'COMPLETED' OR NOT is_cancel_wanted)
ORDER BY submitted_ms DESC, rowid DESC LIMIT 100

-- name: newest_of_family
SELECT * FROM runs INDEXED BY runs_by_family WHERE family = :family AND member > 1 ORDER BY member DESC LIMIT 1

-- name: run
SELECT * FROM runs WHERE run_id = :run_id

-- name: family_of
SELECT family FROM runs WHERE run_id = :run_id UNION ALL SELECT family FROM removed_runs WHERE run_id = :run_id LIMIT 1

-- name: families_with_prefix
SELECT DISTINCT family FROM runs WHERE run_id >= :prefix AND run_id < :prefix || char(1114111)
ORDER BY family LIMIT :limit

-- name: newest_with_prefix
SELECT * FROM runs
WHERE run_id >= :prefix AND run_id < :prefix || char(1114111) AND family = :family ORDER BY member DESC LIMIT 1

-- name: num_families_with_prefix
SELECT count(DISTINCT family) AS num FROM runs WHERE run_id >= :prefix AND run_id < :prefix || char(1114111)

-- name: kinds_in_queue
WITH RECURSIVE kinds (needs) AS (
    SELECT (SELECT min(needs) FROM runs INDEXED BY runs_in_queue WHERE state = 'PENDING')
    UNION ALL
    SELECT (SELECT min(needs) FROM runs INDEXED BY runs_in_queue WHERE state = 'PENDING' AND needs > kinds.needs)
    FROM kinds
    WHERE kinds.needs IS NOT NULL
)
SELECT needs FROM kinds WHERE needs IS NOT NULL LIMIT :limit

-- name: queue
SELECT run_id, priority, submitted_ms, needs, cause, attempt, interpreter FROM runs INDEXED BY runs_in_queue
WHERE state = 'PENDING' AND needs = :needs AND interpreter NOT IN (SELECT value FROM json_each(:without))
  AND (not_before_ms <= :now_ms OR :now_ms + :slack_ms < (
      SELECT ended_ms FROM attempts WHERE attempts.run_id = runs.run_id AND number = attempt))
ORDER BY priority DESC, submitted_ms, run_id LIMIT :limit

-- name: next_backoff
SELECT min(not_before_ms) AS at_ms FROM runs INDEXED BY runs_in_backoff
WHERE state = 'PENDING' AND not_before_ms > 0 AND not_before_ms > :now_ms AND :now_ms + :slack_ms >= (
    SELECT ended_ms FROM attempts WHERE attempts.run_id = runs.run_id AND number = attempt)

-- name: live
SELECT * FROM runs INDEXED BY runs_live WHERE state IN ('DISPATCHING', 'RUNNING') ORDER BY submitted_ms, run_id

-- name: has_unfinished
SELECT 1 WHERE EXISTS (SELECT 1 FROM runs INDEXED BY runs_in_queue WHERE state = 'PENDING')
            OR EXISTS (SELECT 1 FROM runs INDEXED BY runs_live WHERE state IN ('DISPATCHING', 'RUNNING'))

-- name: snapshots
SELECT DISTINCT snapshot FROM runs
WHERE snapshot != '' AND run_id NOT IN (SELECT value FROM json_each(:run_ids))

-- name: changed
SELECT * FROM run_heads WHERE change > :after ORDER BY change LIMIT :limit

-- name: page
SELECT * FROM run_heads
WHERE (:state_words = '' OR instr(:state_words, '|' || state || '|'))
  AND (:name = '' OR instr(name, :name))
  AND (:num_tags = 0 OR :num_tags = (
      SELECT count(*) FROM json_each(:tags) AS wanted JOIN json_each(tags) AS own USING (key, value)))
  AND (submitted_ms, run_id) < (:before_ms, :before_id)
ORDER BY submitted_ms DESC, run_id DESC LIMIT :limit

-- name: counts
SELECT state, count(*) AS num FROM runs GROUP BY state

-- name: move
UPDATE runs SET state = :state, cause = :cause, updated_ms = :now_ms, ended_ms = :ended_ms, change = :change,
                not_before_ms = :not_before_ms
WHERE run_id = :run_id

-- name: hold_run
UPDATE runs SET attempt = :attempt, devices = :devices WHERE run_id = :run_id

-- name: want_cancel
UPDATE runs SET is_cancel_wanted = 1, cancel_reason = :reason, cause = :cause, updated_ms = :now_ms, change = :change
WHERE run_id = :run_id

-- name: set_labels
UPDATE runs SET name = :name, notes = :notes, tags = :tags, change = :change WHERE run_id = :run_id

-- name: progress
UPDATE runs SET step = :step, end_step = coalesce(:end_step, end_step),
                start_step = coalesce(:start_step, start_step), last_seq = :last_seq, metrics = :metrics,
                event_offset = :offset, updated_ms = :now_ms, change = :change
WHERE run_id = :run_id

-- name: rewind
UPDATE runs SET event_offset = :offset WHERE run_id = :run_id

-- name: forget_places_after
DELETE FROM event_places WHERE run_id = :run_id AND offset > :offset

-- name: newest_place
SELECT seq, offset FROM event_places WHERE run_id = :run_id ORDER BY seq DESC LIMIT 1

-- name: add_place
INSERT INTO event_places (run_id, seq, offset) VALUES (:run_id, :seq, :offset) ON CONFLICT DO NOTHING

-- name: event_place
SELECT seq, offset FROM event_places WHERE run_id = :run_id AND seq <= :seq ORDER BY seq DESC LIMIT 1

-- name: set_cause
UPDATE runs SET cause = :cause, updated_ms = :now_ms, change = :change WHERE run_id = :run_id

-- name: interrupted
UPDATE runs SET num_interruptions = num_interruptions + 1 WHERE run_id = :run_id

-- name: stopped_early
UPDATE runs SET stop_reason = :stop_reason WHERE run_id = :run_id

-- name: add_attempt
INSERT INTO attempts (run_id, number, launched_ms, last_heartbeat_ms, devices, cause)
VALUES (:run_id, :number, :now_ms, :now_ms, :devices, '{}')

-- name: attempt
SELECT * FROM attempts WHERE run_id = :run_id AND number = :number

-- name: attempts
SELECT * FROM attempts WHERE run_id = :run_id ORDER BY number

-- name: launched
UPDATE attempts SET worker = :worker, pid = :pid, last_heartbeat_ms = :now_ms
WHERE run_id = :run_id AND number = :number

-- name: follow
UPDATE attempts SET step = :step, last_heartbeat_ms = max(last_heartbeat_ms, :heartbeat_ms)
WHERE run_id = :run_id AND number = :number

-- name: end_attempt
UPDATE attempts SET ended_ms = :now_ms, exit_code = :exit_code, category = :category, cause = :cause,
                    saved_step = :saved_step
WHERE run_id = :run_id AND number = :number AND ended_ms IS NULL

-- name: slots
SELECT * FROM slots ORDER BY device_id

-- name: add_slot
INSERT INTO slots (device_id) VALUES (:device_id) ON CONFLICT DO NOTHING

-- name: take_slot
UPDATE slots SET run_id = :run_id, attempt = :attempt, since_ms = :now_ms
WHERE device_id = :device_id AND run_id IS NULL AND quarantine_reason = ''

-- name: free_slots
UPDATE slots SET run_id = NULL, attempt = NULL, since_ms = NULL WHERE run_id = :run_id AND attempt = :attempt

-- name: quarantine
UPDATE slots SET quarantine_reason = :reason WHERE device_id = :device_id

-- name: hold
INSERT INTO holdings (run_id, attempt, cpus, memory_mb) VALUES (:run_id, :attempt, :cpus, :memory_mb)

-- name: let_go
DELETE FROM holdings WHERE run_id = :run_id AND attempt = :attempt

-- name: holdings
SELECT run_id, cpus, memory_mb FROM holdings ORDER BY run_id

-- name: num_ahead
SELECT count(*) AS num FROM runs
WHERE state = 'PENDING' AND not_before_ms <= :now_ms
  AND (-priority, submitted_ms, run_id) < (-:priority, :submitted_ms, :run_id)

-- name: held
SELECT coalesce(sum(cpus), 0) AS cpus, coalesce(sum(memory_mb), 0) AS memory_mb FROM holdings

-- name: remember_bus_cancel
INSERT INTO bus_cancels (command_id, asked, run_id) VALUES (:command_id, :asked, :run_id)
ON CONFLICT (command_id) DO UPDATE SET asked = excluded.asked, run_id = excluded.run_id

-- name: bus_cancel
SELECT run_id FROM bus_cancels WHERE command_id = :command_id AND asked = :asked

-- name: forget_bus_cancels
DELETE FROM bus_cancels WHERE number <= (SELECT max(number) FROM bus_cancels) - :kept

-- name: begin_outbox
INSERT INTO outbox_cursors (consumer, change) SELECT :consumer, value FROM last_change WHERE true
ON CONFLICT DO NOTHING

-- name: outbox_cursor
SELECT change FROM outbox_cursors WHERE consumer = :consumer

-- name: outbox_place
SELECT seq, offset FROM outbox_places WHERE consumer = :consumer AND run_id = :run_id

-- name: move_outbox_cursor
UPDATE outbox_cursors SET change = :change WHERE consumer = :consumer

-- name: move_outbox_place
INSERT INTO outbox_places (consumer, run_id, seq, offset)
SELECT :consumer, :run_id, :seq, :offset WHERE EXISTS (SELECT 1 FROM runs WHERE run_id = :run_id)
ON CONFLICT DO UPDATE SET seq = excluded.seq, offset = excluded.offset

-- name: outbox_backlog
SELECT count(*) AS num_runs, coalesce(sum(max(0, runs.last_seq - coalesce(place.seq, 0))), 0) AS num_events
FROM runs LEFT JOIN outbox_places AS place ON place.consumer = :consumer AND place.run_id = runs.run_id
WHERE runs.change > :change

-- name: log_places
SELECT run_id, copy, seq, offset, output_offset, num_job_lines FROM log_places
WHERE run_id IN (SELECT value FROM json_each(:run_ids))

-- name: move_log_place
INSERT INTO log_places (run_id, copy, seq, offset, output_offset, num_job_lines)
SELECT :run_id, :copy, :seq, :offset, :output_offset, :num_job_lines
WHERE EXISTS (SELECT 1 FROM runs WHERE run_id = :run_id)
ON CONFLICT DO UPDATE SET seq = excluded.seq, offset = excluded.offset, output_offset = excluded.output_offset,
                          num_job_lines = excluded.num_job_lines

-- name: log_dirs
SELECT DISTINCT log_dir FROM runs WHERE log_dir != ''

-- name: children
SELECT run_id, parent_run_id FROM runs
WHERE parent_run_id IN (SELECT value FROM json_each(:run_ids)) AND run_id NOT IN (SELECT value FROM json_each(:run_ids))
ORDER BY submitted_ms

-- name: unfinished_configs
SELECT run_id, config FROM runs WHERE state IN ('PENDING', 'DISPATCHING', 'RUNNING')

-- name: ended_before
SELECT * FROM runs WHERE ended_ms < :before_ms AND state IN ('COMPLETED', 'FAILED', 'CANCELLED')
ORDER BY submitted_ms, run_id

-- name: not_told
SELECT consumer FROM outbox_cursors
WHERE consumer IN (SELECT value FROM json_each(:consumers)) AND change < (SELECT change FROM runs WHERE run_id = :run_id)

-- name: add_artifact
INSERT INTO artifacts (artifact_id, run_id, seq, attempt, step, kind, name, path, media_type, size_bytes, created_ms,
                       poster_id)
VALUES (:artifact_id, :run_id, :seq, :attempt, :step, :kind, :name, :path, :media_type, :size_bytes, :created_ms,
        :poster_id)
ON CONFLICT (artifact_id) DO NOTHING

-- name: artifact
SELECT * FROM artifacts WHERE artifact_id = :artifact_id

-- name: artifacts
SELECT * FROM artifacts
WHERE run_id = :run_id AND (:kind = '' OR kind = :kind) AND (:state = '' OR state = :state)
  AND (seq, artifact_id) < (:before_seq, :before_id)
ORDER BY seq DESC, artifact_id DESC LIMIT :limit

-- name: unchecked_artifacts
SELECT * FROM artifacts INDEXED BY artifacts_unchecked WHERE run_id = :run_id AND state = 'checking'
ORDER BY seq LIMIT :limit

-- name: runs_with_unchecked_artifacts
SELECT DISTINCT run_id FROM artifacts INDEXED BY artifacts_unchecked WHERE state = 'checking'

-- name: present_files
SELECT artifact_id, kind, path FROM artifacts INDEXED BY artifacts_by_kind
WHERE run_id = :run_id AND state = 'present' AND (:kind = '' OR kind = :kind)

-- name: settle_artifact
UPDATE artifacts SET state = :state, path = :path, size_bytes = :size_bytes, sha256 = :sha256, stamp = :stamp,
                     cause = :cause
WHERE artifact_id = :artifact_id AND run_id = :run_id AND state = 'checking'

-- name: supersede_artifacts
UPDATE artifacts SET state = 'removed'
WHERE run_id = :run_id AND path = :path AND artifact_id != :artifact_id AND state = 'present'

-- name: forget_posters
UPDATE artifacts SET poster_id = ''
WHERE run_id = :run_id AND poster_id != '' AND poster_id IN (SELECT value FROM json_each(:artifact_ids))

-- name: artifacts_are_gone
UPDATE artifacts SET state = 'removed'
WHERE artifact_id IN (SELECT value FROM json_each(:artifact_ids)) AND run_id = :run_id AND state = 'present'

-- name: summarize_artifacts
UPDATE runs SET
    newest_video = coalesce((SELECT artifact_id FROM artifacts WHERE run_id = :run_id AND kind = 'video'
                             AND state = 'present' ORDER BY seq DESC, artifact_id DESC LIMIT 1), ''),
    newest_sample = coalesce((SELECT artifact_id FROM artifacts WHERE run_id = :run_id AND kind = 'sample'
                              AND state = 'present' ORDER BY seq DESC, artifact_id DESC LIMIT 1), ''),
    num_refused_artifacts = (SELECT count(*) FROM artifacts WHERE run_id = :run_id AND state = 'refused')
WHERE run_id = :run_id

-- name: note_change
UPDATE runs SET change = :change, updated_ms = :now_ms WHERE run_id = :run_id AND ended_ms IS NULL

-- name: remove_artifacts
DELETE FROM artifacts WHERE run_id = :run_id

-- name: remove_attempts
DELETE FROM attempts WHERE run_id = :run_id

-- name: remove_event_places
DELETE FROM event_places WHERE run_id = :run_id

-- name: remove_outbox_places
DELETE FROM outbox_places WHERE run_id = :run_id

-- name: remove_log_places
DELETE FROM log_places WHERE run_id = :run_id

-- name: remove_run
DELETE FROM runs WHERE run_id = :run_id

-- name: removed
INSERT INTO removed_runs (run_id, removed_ms, change, family, member)
VALUES (:run_id, :now_ms, :change, :family, :member)
ON CONFLICT DO UPDATE SET removed_ms = excluded.removed_ms, change = excluded.change, family = excluded.family,
                          member = excluded.member

-- name: resume_paths
SELECT DISTINCT json_extract(config, '$.resume_checkpoint_path') AS path FROM runs
WHERE json_extract(config, '$.resume_checkpoint_path') IS NOT NULL

-- name: unknown_ids
SELECT value AS run_id FROM json_each(:run_ids) WHERE value NOT IN (SELECT run_id FROM runs) ORDER BY key

-- name: has_run
SELECT 1 FROM runs WHERE run_id = :run_id

-- name: removed_run
SELECT * FROM removed_runs WHERE run_id = :run_id

-- name: newest_removed_of_family
SELECT max(member) AS member FROM removed_runs WHERE family = :family

-- name: removed_after
SELECT run_id, change FROM removed_runs WHERE change > :after ORDER BY change LIMIT :limit

-- name: members
SELECT run_id FROM runs WHERE run_id = :family OR (family = :family AND member > 1) ORDER BY member

-- name: trainers
SELECT run_id, coalesce(CAST(json_extract(config, '$.trainer') AS TEXT), '') AS trainer FROM runs
WHERE run_id IN (SELECT value FROM json_each(:run_ids))

-- name: attempts_between
SELECT * FROM attempts WHERE launched_ms < :to_ms AND coalesce(ended_ms, :to_ms) >= :from_ms
ORDER BY launched_ms DESC LIMIT :limit

-- name: past_speeds
SELECT sum(ended_ms - launched_ms) / 1000.0 / (max(past.step) - max(past.start_step)) AS step_s
FROM (SELECT run_id, step, start_step FROM runs
      WHERE state = 'COMPLETED' AND step > start_step AND json_extract(config, '$.trainer') = :trainer
      ORDER BY submitted_ms DESC, run_id DESC LIMIT :limit) AS past
JOIN attempts USING (run_id)
WHERE ended_ms > launched_ms
GROUP BY run_id

-- name: served_as
SELECT served.*, runs.state, runs.attempt FROM served JOIN runs USING (run_id) WHERE served.name = :name

-- name: served_by
SELECT served.*, runs.state, runs.attempt FROM served JOIN runs USING (run_id) WHERE served.run_id = :run_id

-- name: all_served
SELECT served.*, runs.state, runs.attempt FROM served JOIN runs USING (run_id) ORDER BY served.name

-- name: take_name
INSERT INTO served (name, run_id) VALUES (:name, :run_id)

-- name: give_up_name
DELETE FROM served WHERE name = :name

-- name: ready
UPDATE served SET url = :url, bearer_file = :bearer_file, ready_ms = :at_ms, ready_attempt = :attempt, live = :live,
                  previous = :previous
WHERE name = :name AND run_id = :run_id

-- name: answers_now
UPDATE served SET live = :live, previous = :previous, second = :second, second_is = :second_is, percent = :percent
WHERE name = :name

-- name: next_promotion
SELECT coalesce(max(number), 0) + 1 AS number FROM promotions WHERE name = :name

-- name: add_promotion
INSERT INTO promotions (name, number, run_id, action, state, version, percent, gate_spec, "by", asked_ms, promotion_id)
VALUES (:name, :number, :run_id, :action, 'wanted', :version, :percent, :gate_spec, :by, :now_ms, :promotion_id)

-- name: promotion_by_id
SELECT * FROM promotions WHERE promotion_id = :promotion_id AND promotion_id != ''

-- name: promotion
SELECT * FROM promotions WHERE name = :name AND number = :number

-- name: promotions
SELECT * FROM promotions WHERE name = :name ORDER BY number DESC LIMIT :limit

-- name: wanted_promotions
SELECT run_id, max(number) AS number, action, version, percent, gate_spec, "by"
FROM promotions INDEXED BY promotions_wanted WHERE state = 'wanted' GROUP BY run_id

-- name: versions_of
SELECT version FROM promotions WHERE name = :name AND version != 'null' ORDER BY number DESC

-- name: end_promotion
UPDATE promotions SET state = :state, ended_ms = :at_ms, cause = :cause, words = :words, gate = :gate,
                      previous = coalesce(:previous, previous)
WHERE name = :name AND number = :number AND run_id = :run_id AND state = 'wanted'

-- name: replace_before
UPDATE promotions SET state = 'replaced', ended_ms = :at_ms
WHERE name = :name AND number < :number AND run_id = :run_id AND state = 'wanted'

-- name: refuse_up_to
UPDATE promotions SET state = 'refused', ended_ms = :at_ms, cause = :cause, words = :words
WHERE name = :name AND number <= :number AND run_id = :run_id AND state = 'wanted'

-- name: refuse_all
UPDATE promotions SET state = 'refused', ended_ms = :at_ms, cause = :cause, words = :words
WHERE run_id = :run_id AND state = 'wanted'

-- name: add_due_feedback
INSERT INTO due_feedback (run_id, number, rows, files, reason, version, figures, at_ms)
VALUES (:run_id, :number, :rows, :files, :reason, :version, :figures, :at_ms)
ON CONFLICT DO NOTHING

-- name: open_due_feedback
SELECT * FROM due_feedback INDEXED BY due_feedback_open WHERE is_settled = 0 ORDER BY at_ms, run_id, number

-- name: feedback_files
SELECT files, rows FROM due_feedback WHERE run_id = :run_id AND number <= :number ORDER BY number

-- name: settle_due_feedback
UPDATE due_feedback SET child = :child, fault = :fault, is_settled = :is_settled
WHERE run_id = :run_id AND number = :number

-- name: remove_served
DELETE FROM served WHERE run_id = :run_id

-- name: remove_promotions
DELETE FROM promotions WHERE run_id = :run_id

-- name: remove_due_feedback
DELETE FROM due_feedback WHERE run_id = :run_id

-- name: inference_configs
SELECT config FROM runs WHERE kind != 'training' OR json_extract(config, '$.weights') IS NOT NULL

-- name: promoted_versions
SELECT version FROM promotions WHERE version != 'null'
