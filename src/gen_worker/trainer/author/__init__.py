"""The author's code: loading a class, its hooks, which code it is, what it reads and saves."""
