"""A checkpoint's meta, which checkpoint is taken, which are kept; one reader for worker, daemon and commands."""
