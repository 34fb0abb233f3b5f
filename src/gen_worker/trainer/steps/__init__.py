"""What is due around a step: schedule, metrics, validation, saving, sampling. No I/O of its own."""
