"""The author's code: loading a class, its hooks, its identity, what it reads and saves."""
