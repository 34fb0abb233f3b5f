"""A run that is followed to its end: the stream, Ctrl-C, whether a daemon is there."""
