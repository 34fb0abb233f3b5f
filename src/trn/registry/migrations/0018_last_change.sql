-- The last change is that of the newest run, or of a run that was removed: only a removal has to write the counter. With a
-- row that every transaction writes, each would write a page more.
DROP VIEW last_change;
CREATE VIEW last_change AS
SELECT max((SELECT value FROM change_counter), coalesce((SELECT max(change) FROM runs), 0)) AS value;
