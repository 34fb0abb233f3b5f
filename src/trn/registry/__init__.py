"""The registry: the truth about runs. One writer, many readers."""
