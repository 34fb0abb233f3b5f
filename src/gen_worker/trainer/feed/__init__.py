"""Parquet files as batches: the order of the rows, the footers, reading ahead, the decode-once cache."""
