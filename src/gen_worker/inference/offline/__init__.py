"""Predictions for parquet files: one output part for each row group of the input, each exactly once."""
