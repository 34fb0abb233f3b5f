"""Dataset folders: index, schema and integrity checks."""
