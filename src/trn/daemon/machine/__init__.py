"""GPUs, CPUs, memory; what an interpreter has; what a run trained with."""
