"""The batch shapes of a model: few and fixed, so that the bits of a row depend neither on its place nor on its neighbours.

A batch is padded to the smallest shape that holds it, with copies of its last row.
"""

from functools import cache

STEP = 8


@cache
def batch_shapes(max_batch_rows: int) -> tuple[int, ...]:
    """Powers of 8 below `max_batch_rows`, and that itself: 32 -> 1, 8, 32."""
    shapes = []
    shape = 1
    while shape < max_batch_rows:
        shapes.append(shape)
        shape *= STEP
    return (*shapes, max_batch_rows)


def shape_for(num_rows: int, max_batch_rows: int) -> int:
    """The smallest shape that holds so many rows: at most `max_batch_rows`."""
    return next(shape for shape in batch_shapes(max_batch_rows) if shape >= num_rows)
