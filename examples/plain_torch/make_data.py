"""Writes train.parquet and validation.parquet: noisy points on three spiral arms."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ARMS = 3


def spirals(num_rows: int, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    arm = random.integers(NUM_ARMS, size=num_rows)
    radius = np.sqrt(random.uniform(0.05, 1, num_rows))
    angle = 2 * np.pi * (arm / NUM_ARMS + radius)
    point = radius * np.stack([np.cos(angle), np.sin(angle)]) + random.normal(scale=0.08, size=(2, num_rows))
    flat = pa.array(point.T.reshape(-1), pa.float32())
    return pa.table({"point": pa.FixedSizeListArray.from_arrays(flat, 2), "arm": arm})


pq.write_table(spirals(600, seed=1), "train.parquet")
pq.write_table(spirals(2_000, seed=2), "validation.parquet")
