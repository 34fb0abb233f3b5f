-- The number of the last change of any run, also of those that were removed: any process may ask what changed since.
CREATE TABLE change_counter (
    id    INTEGER PRIMARY KEY CHECK (id = 1),
    value INTEGER NOT NULL
) STRICT;
INSERT INTO change_counter (id, value) SELECT 1, value FROM last_change;
DROP VIEW last_change;
CREATE VIEW last_change AS SELECT value FROM change_counter;
