"""Model processes: the parent that forks them, templates that hold a loaded version, workers that answer."""
