"""Reads events files into the registry and the metric store, each event once."""
