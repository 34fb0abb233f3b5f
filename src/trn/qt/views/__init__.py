"""What the window shows: the table of runs, the views of one run, the daemon, a job before its submit."""
