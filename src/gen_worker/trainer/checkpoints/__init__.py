"""Checkpoint files: what is in them, how they are written whole, how they are chosen and read back."""
