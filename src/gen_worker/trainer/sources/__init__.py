"""The author's own data: Datasets, DataLoaders and iterables as batches that resume exactly."""
