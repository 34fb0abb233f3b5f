"""Serves and predicts with what was trained: a thin front without torch, and forked model workers behind it."""
