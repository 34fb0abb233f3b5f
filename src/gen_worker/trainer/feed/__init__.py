"""Parquet files as batches: row order, footers, readahead, the decode-once cache."""
