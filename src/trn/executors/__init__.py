"""Where workers run: an executor launches, adopts, signals and ends them, and says how they ended."""
