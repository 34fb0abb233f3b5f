"""Where workers run: an executor starts, finds, stops and ends them, and reads what they write."""
