"""The parquet files that models are trained on here, made once and kept in .data/; and a reader written by hand.

`vectors`: float32[256] as a fixed-size list, and a class of 10. `images`: 28 x 28 pixels as uint8, and a class. Each
65,536 rows in 2 files of 4 row groups, snappy. `held_out`: 1,280 rows of the vectors' kind.
"""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import DATA

NUM_FILES = 2
GROUP_ROWS = 8_192
GROUPS_PER_FILE = 4
NUM_CLASSES = 10
VECTOR_WIDTH = 256
IMAGE_SIZE = 28
HELD_OUT_ROWS = 1_280


def vectors() -> list[str]:
    return _files("vectors", NUM_FILES, GROUPS_PER_FILE * GROUP_ROWS)


def images() -> list[str]:
    return _files("images", NUM_FILES, GROUPS_PER_FILE * GROUP_ROWS)


def held_out() -> list[str]:
    return _files("held-out", 1, HELD_OUT_ROWS)


def _files(name: str, num_files: int, rows_per_file: int) -> list[str]:
    """The files, written first where they are missing."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = DATA / f"training-{name}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for number in range(num_files):
            if name == "images":
                width = IMAGE_SIZE * IMAGE_SIZE
                values = rng.integers(0, 256, rows_per_file * width, dtype=np.uint8)
            else:
                width = VECTOR_WIDTH
                values = rng.standard_normal(rows_per_file * width, dtype=np.float32)
            labels = rng.integers(0, NUM_CLASSES, rows_per_file, dtype=np.int64)
            table = pa.table(
                {
                    "x": pa.FixedSizeListArray.from_arrays(pa.array(values), width),
                    "label": pa.array(labels),
                }
            )
            path = partial / f"part-{number}.parquet"
            pq.write_table(table, path, row_group_size=GROUP_ROWS, compression="snappy")
        partial.rename(folder)
    return [str(path) for path in sorted(Path(folder).glob("*.parquet"))]


def read_by_hand(
    files: Sequence[str], batch_size: int, *, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Any, Any]]:
    """What one writes for a loop of one's own: (x, label) without end. A thread decodes the next row group meanwhile;
    tensors are made once for each. `batch_size` is that of all processes.

    Row groups must be multiples of the batch size; no shuffle, no position, no word on what is wrong with a file.
    """
    import pyarrow.parquet as pq
    import torch

    readers = [pq.ParquetFile(file) for file in files]
    places = [(reader, number) for reader in readers for number in range(reader.num_row_groups)]
    own = batch_size // world_size

    def decode(place: tuple[Any, int]) -> tuple[Any, Any]:
        reader, number = place
        group = reader.read_row_group(number, use_threads=False).combine_chunks().to_batches()[0]
        x = group.column("x").flatten().to_numpy()
        # A copy: torch warns of memory that it may not write to, and one a row group costs little.
        tensors = torch.from_numpy(x.copy()).view(group.num_rows, -1)
        return tensors, torch.from_numpy(group.column("label").to_numpy().copy())

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(decode, places[0])
        for place in itertools.cycle([*places[1:], places[0]]):
            (x, label), coming = coming.result(), pool.submit(decode, place)
            for start in range(rank * own, x.shape[0], batch_size):
                yield x[start : start + own], label[start : start + own]
