"""People's own data: Datasets, DataLoaders and iterables, opened as batches that resume exactly."""
