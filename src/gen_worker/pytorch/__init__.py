"""Training from a config file: models, losses, optimizers and data columns by name. See `pytorch_runner`."""
