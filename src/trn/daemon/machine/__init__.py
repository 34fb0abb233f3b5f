"""GPUs, CPUs and memory; reports about interpreters; workers that are not in the registry."""
