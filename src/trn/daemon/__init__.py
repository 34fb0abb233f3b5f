"""The daemon: queues runs, starts and follows them, and serves the API."""
