"""From columns of a batch to the tensors that the runner's model takes."""
