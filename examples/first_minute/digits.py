"""A small but real data set: digits drawn with a random place, size, tilt and brightness, and noise over them."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

SIDE = 16  # pixels

# Five columns, seven rows, top to bottom.
GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


def draw_digits(num: int, *, seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(num, SIDE * SIDE) grey values and the digits they show."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, num)
    ink = np.array([[[int(dot) for dot in row] for row in glyph.split()] for glyph in GLYPHS], np.float32)
    canvas = np.zeros((10, 11, 9), np.float32)  # a rim of two, so that the outside is paper
    canvas[:, 2:-2, 2:-2] = ink

    tilt = random.uniform(-0.35, 0.35, (num, 1, 1))
    size = random.uniform(1.3, 1.9, (num, 1, 1))
    shift = random.uniform(-2.0, 2.0, (2, num, 1, 1))
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] - (SIDE - 1) / 2
    down, right = rows - shift[0], columns - shift[1]
    y = (np.cos(tilt) * down + np.sin(tilt) * right) / size + 5.0
    x = (np.cos(tilt) * right - np.sin(tilt) * down) / size + 4.0
    images = _look_up(canvas, labels, y, x)

    images *= random.uniform(0.5, 1.0, (num, 1, 1))
    images += random.normal(0.0, 0.15, images.shape)
    grey = np.clip(images * 255, 0, 255).astype(np.uint8)
    return grey.reshape(num, SIDE * SIDE), labels


def _look_up(
    canvas: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    y: npt.NDArray[np.float64],
    x: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Bilinear interpolation of each label's canvas at (y, x)."""
    y, x = np.clip(y, 0, canvas.shape[1] - 1.001), np.clip(x, 0, canvas.shape[2] - 1.001)
    top, left = y.astype(int), x.astype(int)
    dy, dx = y - top, x - left
    which = labels[:, None, None]
    upper = canvas[which, top, left] * (1 - dx) + canvas[which, top, left + 1] * dx
    lower = canvas[which, top + 1, left] * (1 - dx) + canvas[which, top + 1, left + 1] * dx
    found: npt.NDArray[np.float64] = upper * (1 - dy) + lower * dy
    return found


def write_digits(folder: Path, *, num_files: int, rows_per_file: int, row_group_size: int, seed: int) -> None:
    """Parquet files with the columns `pixels` (uint8[256]) and `label` (int64)."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        pixels, labels = draw_digits(rows_per_file, seed=seed + number)
        table = pa.table(
            {
                "pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), SIDE * SIDE),
                "label": pa.array(labels),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=row_group_size)
