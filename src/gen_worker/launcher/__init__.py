"""The warm parent: forks workers, reaps them, and records how they ended."""
