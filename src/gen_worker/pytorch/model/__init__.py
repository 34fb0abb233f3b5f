"""The runner's model, loss, optimizer and metrics, built from a config."""
