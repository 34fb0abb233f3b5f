"""The parquet files of the feed benchmark, and the copies that the cached sides map: made once, kept in .data/.

Each row: float32[64] as a fixed-size list, an int64 label, a caption of 26 bytes. 8 files of 4 row groups of 65,536
rows, snappy: 2,097,152 rows, 607 MB in memory. A quick run has the same shape with row groups of a quarter.
"""

import shutil
from pathlib import Path

from harness import DATA

NUM_FILES = 8
GROUPS_PER_FILE = 4
WIDTH = 64


def num_rows(*, quick: bool) -> int:
    return NUM_FILES * GROUPS_PER_FILE * _group_rows(quick=quick)


def _group_rows(*, quick: bool) -> int:
    return 16_384 if quick else 65_536


def parquet_files(*, quick: bool) -> list[str]:
    """The files, written first where they are missing."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows_per_file = num_rows(quick=quick) // NUM_FILES
    folder = _folder(quick=quick) / "parquet"
    if not folder.exists():
        partial = folder.with_name("parquet.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for number in range(NUM_FILES):
            rows = range(number * rows_per_file, (number + 1) * rows_per_file)
            values = rng.standard_normal(rows_per_file * WIDTH, dtype=np.float32)
            table = pa.table(
                {
                    "x": pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH),
                    "label": pa.array(np.arange(rows.start, rows.stop, dtype=np.int64)),
                    "caption": pa.array([f"a caption of row {row:09d}" for row in rows]),
                }
            )
            path = partial / f"part-{number}.parquet"
            pq.write_table(table, path, row_group_size=_group_rows(quick=quick), compression="snappy")
        partial.rename(folder)
    return [str(path) for path in sorted(folder.glob("*.parquet"))]


def own_cache_dir(*, quick: bool) -> Path:
    return _folder(quick=quick) / "own-cache"


def hf_cache_dir(*, quick: bool) -> Path:
    return _folder(quick=quick) / "hf-cache"


def _folder(*, quick: bool) -> Path:
    return DATA / f"rows-{num_rows(quick=quick)}"
