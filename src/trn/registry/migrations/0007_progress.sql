-- Why an attempt ended, as an id; and the step that the next one would resume from, by which retries are decided.
ALTER TABLE attempts ADD COLUMN cause_id TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN saved_step INTEGER NOT NULL DEFAULT 0;
