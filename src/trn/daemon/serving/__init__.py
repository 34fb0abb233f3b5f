"""Served models: which checkpoint is meant, promotions, and the runs that a server is followed by or submits."""
