"""Decoded windows, and gathering blocks of shuffled batches from them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gen_worker.trainer.feed.order import EpochOrder, Rows, Share, Window

# Many shuffled batches are gathered at once, so that a batch of 32 rows costs a slice, not a gather.
BLOCK_ROWS = 16384

Fetch = Callable[[int], pa.RecordBatch]  # decodes a row group, in the order of the schedule
Held = dict[int, "deque[HeldWindow]"]  # by lane
Mask = npt.NDArray[np.bool_]


class HeldWindow:
    """A decoded window and its permutation."""

    def __init__(self, plan: EpochOrder, window: Window, fetch: Fetch) -> None:
        self.start = window.start
        self.stop = window.start + window.rows
        self._permutation = plan.permutation(window)
        # Small pieces are joined: a gather from each of many would be slow.
        self._pieces: list[pa.RecordBatch] = []
        small: list[pa.RecordBatch] = []
        small_rows = 0
        for piece in window.pieces:
            num_rows = piece.stop - piece.start
            if small and max(num_rows, small_rows) >= BLOCK_ROWS:
                self._pieces.append(join_batches(small))
                small, small_rows = [], 0
            small.append(fetch(piece.group).slice(piece.start, num_rows))
            small_rows += num_rows
        self._pieces.append(join_batches(small))
        ends = np.cumsum([piece.num_rows for piece in self._pieces])
        self._edges = np.concatenate([[0], ends])
        self._piece_of = np.searchsorted(ends, self._permutation, side="right").astype(np.uint16)

    def take(self, chosen: slice, is_mine: Mask | None, places: Rows) -> list[tuple[pa.RecordBatch, Rows]]:
        """The `chosen` rows of the window's order by piece, each with its part of `places`."""
        rows, piece_of = self._permutation[chosen], self._piece_of[chosen]
        if is_mine is not None:
            rows, piece_of, places = rows[is_mine], piece_of[is_mine], places[is_mine]
        if len(self._pieces) == 1:
            return [(take_rows(self._pieces[0], rows), places)] if len(rows) else []
        by_piece = np.argsort(piece_of, kind="stable")
        bounds = np.searchsorted(piece_of[by_piece], np.arange(len(self._pieces) + 1))
        parts = []
        for number, piece in enumerate(self._pieces):
            mine = by_piece[bounds[number] : bounds[number + 1]]
            if len(mine):
                parts.append((take_rows(piece, rows[mine] - self._edges[number]), places[mine]))
        return parts


def gather(
    held: Held, shares: Sequence[Share], per_lane: int, batch: int, stop: int
) -> pa.RecordBatch | None:
    """Batches [batch, stop), concatenated, each with the rows of the shares in order. None if the shares are empty."""
    width = sum(share.stop - share.start for share in shares)
    parts: list[tuple[pa.RecordBatch, Rows]] = []  # rows, and their places in the block
    base, origin = 0, batch * per_lane
    for share in shares:
        places, is_mine = _places(stop - batch, per_lane, width, base - share.start, share.start, share.stop)
        for window in held[share.lane]:
            first, last = max(origin, window.start), min(stop * per_lane, window.stop)
            if first < last:
                here = slice(first - origin, last - origin)
                mask = None if is_mine is None else is_mine[here]
                parts += window.take(slice(first - window.start, last - window.start), mask, places[here])
        base += share.stop - share.start
    if not parts:
        return None
    block = join_batches([rows for rows, _ in parts])
    if len(parts) == 1:
        return block  # one window, one piece: its rows are in order
    # The rows are in the CPU cache; ordering them is cheap compared with the gather.
    index = np.empty(block.num_rows, dtype=np.int64)
    index[np.concatenate([places for _, places in parts])] = np.arange(block.num_rows)
    return take_rows(block, index)


@lru_cache(maxsize=32)
def _places(
    num_batches: int, per_lane: int, width: int, base: int, start: int, stop: int
) -> tuple[Rows, Mask | None]:
    """For each row of a lane in a block: its place there, and whether it is in [start, stop)."""
    number, slot = np.divmod(np.arange(num_batches * per_lane), per_lane)
    is_mine = (slot >= start) & (slot < stop) if stop - start < per_lane else None
    return number * width + slot + base, is_mine


def take_rows(batch: pa.RecordBatch, index: Rows) -> pa.RecordBatch:
    """`batch.take` without its checks: our permutations are within bounds."""
    # Not pa.array(): it imports pandas.
    rows = pa.Array.from_buffers(pa.int64(), len(index), [None, pa.py_buffer(index)])
    columns = [pc.take(column, rows, boundscheck=False) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def join_batches(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch of all; a single one is not copied."""
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
