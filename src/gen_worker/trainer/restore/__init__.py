"""From a checkpoint back to a running state: which one, what it holds, what was changed since."""
