"""Start checks, the lock of the home, periodic maintenance, removal of runs, retries."""
