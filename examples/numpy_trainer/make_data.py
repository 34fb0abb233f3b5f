"""Writes train.parquet and validation.parquet: film ratings, generated from hidden factors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_PEOPLE, NUM_FILMS, NUM_TASTES = 300, 200, 4

random = np.random.default_rng(0)
likes = random.normal(size=(NUM_PEOPLE, NUM_TASTES))
offers = random.normal(size=(NUM_FILMS, NUM_TASTES)) / np.sqrt(NUM_TASTES)


def rate(num_rows: int) -> pa.Table:
    person, film = random.integers(NUM_PEOPLE, size=num_rows), random.integers(NUM_FILMS, size=num_rows)
    rating = 3 + (likes[person] * offers[film]).sum(axis=1) + random.normal(scale=0.2, size=num_rows)
    return pa.table({"person": person, "film": film, "rating": rating})


pq.write_table(rate(20_000), "train.parquet", row_group_size=4_000)
pq.write_table(rate(2_000), "validation.parquet")
