"""From answered requests and what was right to parquet files for the next training run, each row once."""
