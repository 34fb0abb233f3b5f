"""Where things leave the daemon: what was committed is told to others, each at its own pace."""
