"""Dataset folders: what is in them, and that it is still what it was."""
