"""Who starts on what; the life of one attempt; what its end makes of the run."""
