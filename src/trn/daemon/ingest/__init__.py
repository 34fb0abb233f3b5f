"""Events files to the registry, each event once."""
