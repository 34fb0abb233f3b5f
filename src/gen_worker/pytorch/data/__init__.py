"""From the columns of a batch to the tensors of the runner's model."""
