"""Snapshots of code: which files, from git or from a folder, without secrets."""
