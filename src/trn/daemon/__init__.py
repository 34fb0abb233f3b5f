"""The daemon: takes runs in, starts them, follows them, ends them, and tells everyone who asks."""
