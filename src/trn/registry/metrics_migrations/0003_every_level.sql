-- Every level is stored; before, every second one was. The daemon builds them again.
DELETE FROM buckets;
UPDATE series SET finest_level = NULL, built_to = 0;
INSERT INTO unbuilt SELECT series_key FROM series WHERE true ON CONFLICT DO NOTHING;
