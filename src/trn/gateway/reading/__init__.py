"""Reads of the home, in threads: registry, metric points, events, logs."""
