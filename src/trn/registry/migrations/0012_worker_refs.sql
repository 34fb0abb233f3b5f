-- What an executor finds a worker by, opaque to everything else. The pid stays, for people.
ALTER TABLE attempts ADD COLUMN worker TEXT NOT NULL DEFAULT '';
UPDATE attempts SET worker = boot_id || '/' || pid || '/' || coalesce(start_ticks, '') WHERE pid > 0;
ALTER TABLE attempts DROP COLUMN boot_id;
ALTER TABLE attempts DROP COLUMN start_ticks;
