"""The files of a checkpoint, byte by byte: state trees, tensors, formats, hashes."""
