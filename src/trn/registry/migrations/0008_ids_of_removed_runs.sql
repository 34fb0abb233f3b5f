-- An id is never used again: logs, messages and people that know it would take the new run for the old one.
-- Of runs that were removed before this, only the id is known.
ALTER TABLE removed_runs ADD COLUMN family TEXT NOT NULL DEFAULT '';
ALTER TABLE removed_runs ADD COLUMN member INTEGER NOT NULL DEFAULT 1;
UPDATE removed_runs SET family = run_id;
CREATE INDEX removed_runs_by_family ON removed_runs (family, member);
