"""The one ordered event file of a run."""
