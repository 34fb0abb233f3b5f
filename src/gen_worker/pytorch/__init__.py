"""Training from a file alone: models, losses, optimizers and data columns by name. `pytorch_runner` is its door."""
