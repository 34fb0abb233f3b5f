"""A job on its way to the daemon: its file, options, code snapshot, and the report of the answer."""
