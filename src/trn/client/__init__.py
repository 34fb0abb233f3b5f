"""What talks to the daemon: the Python client."""
