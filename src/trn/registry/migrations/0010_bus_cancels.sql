-- Which run a cancel that came by the bus meant when it was first read. A name means the newest run of its family, and
-- the same command may be read again when there is a newer one. Only the newest rows are kept.
CREATE TABLE bus_cancels (
    number     INTEGER PRIMARY KEY,
    command_id TEXT NOT NULL UNIQUE,
    asked      TEXT NOT NULL,
    run_id     TEXT NOT NULL
) STRICT;
