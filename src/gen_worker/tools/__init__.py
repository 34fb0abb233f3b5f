"""Programs that the command line runs in a worker's interpreter."""
