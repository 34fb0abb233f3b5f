"""Following a run to its end: its streams, Ctrl-C, and the daemon that may go away."""
