"""Workers on this machine, forked by a warm launcher. What identifies a process is known here and nowhere else."""
