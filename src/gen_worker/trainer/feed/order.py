"""The order of the data is a function; the cursor is an integer.

The rows of batch `b` of epoch `e` depend only on the row-group sizes and (seed, epoch, batch_size, lanes, window). There
is no running generator, so a seek costs the same at any batch, and a resume needs no saved iterator. See
`docs/data-order.md`.

All randomness is raw Philox output keyed by a hash; sorting unique keys makes it a permutation. Raw bit streams are
stable over numpy releases; `Generator.permutation` may change.
"""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gen_worker.errors import InputError

ORDER_VERSION = 1

MAX_DEFAULT_LANES = 8
# A row group at a lane border is decoded by both lanes; this number of groups per lane keeps that below 1/4.
GROUPS_PER_DEFAULT_LANE = 4
# The shuffle keeps at most this decoded, over all lanes, unless one row group is larger.
MIXED_ROWS = 1 << 18
MIXED_BYTES = 96 << 20

# Schema metadata of a rank's part of a short last batch: the rows of all ranks.
GLOBAL_ROWS = b"gen_worker.global_rows"

Rows = npt.NDArray[np.int64]


def permutation(num: int, *path: int) -> Rows:
    """A permutation of range(num) that depends only on `path` (seed, epoch, …)."""
    digest = hashlib.blake2b(
        "/".join(map(str, path)).encode(), digest_size=16, person=b"gen_worker.order"
    ).digest()
    bits: npt.NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(num)
    # The low bits are the index: keys are unique, so every sort algorithm gives the same result.
    index_mask = np.uint64((1 << max(num - 1, 1).bit_length()) - 1)
    bits &= ~index_mask
    bits |= np.arange(num, dtype=np.uint64)
    bits.sort()
    bits &= index_mask
    return bits.view(np.int64)


def default_lanes(batch_size: int, num_groups: int, group_bytes: int = 0) -> int:
    """Independent of the world size, so that a run keeps its order on more or fewer ranks."""
    limit = min(MAX_DEFAULT_LANES, max(num_groups // GROUPS_PER_DEFAULT_LANE, 1))
    if group_bytes:
        limit = min(limit, max(MIXED_BYTES // group_bytes, 1))
    return max(lanes for lanes in range(1, limit + 1) if batch_size % lanes == 0)


def default_window(lanes: int, num_groups: int, num_rows: int, group_bytes: int = 0) -> int:
    """Row-group pieces per window, within the limits of the shuffle over all lanes."""
    mixed = MIXED_ROWS * num_groups // max(num_rows, 1)
    if group_bytes:
        mixed = min(mixed, MIXED_BYTES // group_bytes)
    return max(mixed // lanes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows [start, stop) of one row group."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive pieces of a lane whose rows are permuted together."""

    lane: int
    index: int
    start: int  # in rows of the lane
    rows: int
    first_batch: int  # that needs a row of it
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a rank in a lane: rows [start, stop) of the lane's rows in each batch."""

    lane: int
    start: int
    stop: int


class Cursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next batch to train on, and everything that the order depends on."""

    version: int
    seed: int
    epoch: int
    batch: int
    batch_size: int
    lanes: int
    window: int
    shuffle: bool
    drop_last: bool
    num_rows: int
    manifest_digest: str


class DataOrder:
    """The order of every epoch over row groups of the given sizes. Holds no position."""

    def __init__(
        self,
        group_rows: Sequence[int],
        *,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        lanes: int | None = None,
        window: int | None = None,
        group_bytes: int = 0,
    ) -> None:
        sizes = np.asarray(group_rows, dtype=np.int64)
        groups = np.flatnonzero(sizes)  # without empty row groups
        if lanes is not None and (lanes < 1 or batch_size % lanes):
            choices = ", ".join(str(n) for n in range(1, min(batch_size, 64) + 1) if batch_size % n == 0)
            raise InputError(
                f"batch_size={batch_size} is not a multiple of lanes={lanes}: choose one of {choices}"
            )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.num_rows = int(sizes.sum())
        self.lanes = 1
        self.window = 1
        if shuffle:
            self.lanes = lanes or default_lanes(batch_size, len(groups), group_bytes)
            self.window = window or default_window(self.lanes, len(groups), self.num_rows, group_bytes)
        self.rows_per_lane = batch_size // self.lanes  # of each full batch
        self.full_batches = self.num_rows // batch_size
        self.tail_rows = 0 if drop_last else self.num_rows % batch_size
        self.batches_per_epoch = self.full_batches + (1 if self.tail_rows else 0)
        self.sizes = sizes
        self.groups = groups
        self.group_starts = np.concatenate([[0], np.cumsum(sizes)])

    def epoch(self, epoch: int) -> "EpochOrder":
        return EpochOrder(self, epoch)

    def shares(self, rank: int, world_size: int) -> tuple[Share, ...]:
        """The rows of `rank` in every full batch, in order. The ranks together take each row once.

        Whole lanes if their number is a multiple of the world size; else a slice of the global batch, in adjacent lanes.
        """
        per_lane = self.rows_per_lane
        if self.shuffle and self.lanes % world_size == 0:
            return tuple(
                Share(lane=lane, start=0, stop=per_lane) for lane in range(rank, self.lanes, world_size)
            )
        if self.batch_size % world_size:
            raise InputError(
                f"batch_size={self.batch_size} is not a multiple of world_size={world_size}. Every rank needs the same"
                f" number of rows: choose a batch_size that is a multiple of {world_size}"
            )
        size = self.batch_size // world_size
        first, last = rank * size, (rank + 1) * size
        return tuple(
            Share(
                lane=lane,
                start=max(first - lane * per_lane, 0),
                stop=min(last - lane * per_lane, per_lane),
            )
            for lane in range(first // per_lane, (last - 1) // per_lane + 1)
        )

    def tail_span(self, rank: int, world_size: int) -> tuple[int, int]:
        """The rank's part of the short last batch; may be empty."""
        return self.tail_rows * rank // world_size, self.tail_rows * (rank + 1) // world_size


class EpochOrder:
    """One epoch of a `DataOrder`: row groups permuted, cut into lanes, each lane into windows."""

    def __init__(self, order: DataOrder, epoch: int) -> None:
        self.order = order
        self.epoch = epoch
        groups = order.groups
        self._groups = groups[permutation(len(groups), order.seed, epoch)] if order.shuffle else groups
        self._bounds = np.concatenate([[0], np.cumsum(order.sizes[self._groups])])

    @cached_property
    def tail_lane(self) -> int:
        """The remaining rows are one more lane, with all its rows in the last batch."""
        return self.order.lanes

    def windows(self, lanes: Sequence[int], from_batch: int = 0) -> Iterator[Window]:
        """The windows of `lanes` for the batches from `from_batch` on, in the order of use."""
        streams = [self._lane_windows(lane, from_batch) for lane in lanes]
        if len(streams) == 1:
            return streams[0]
        return heapq.merge(*streams, key=lambda window: (window.first_batch, window.lane))

    def _lane_windows(self, lane: int, from_batch: int) -> Iterator[Window]:
        order = self.order
        if lane == self.tail_lane:
            first = order.full_batches * order.batch_size
            last, per_batch, batch = first + order.tail_rows, max(order.tail_rows, 1), order.full_batches
            from_row = 0
        else:
            per_batch, batch = order.rows_per_lane, 0
            first = lane * order.full_batches * per_batch
            last = first + order.full_batches * per_batch
            from_row = from_batch * per_batch
        if first == last:
            return
        lo = int(np.searchsorted(self._bounds, first, side="right")) - 1
        hi = int(np.searchsorted(self._bounds, last, side="left"))
        at = int(np.searchsorted(self._bounds, first + from_row, side="right")) - 1
        width = order.window
        for index in range((at - lo) // width, -(-(hi - lo) // width)):
            begin = lo + index * width
            end = min(begin + width, hi)
            edges = self._bounds[begin : end + 1].clip(first, last).tolist()
            starts = self._bounds[begin:end].tolist()
            yield Window(
                lane=lane,
                index=index,
                start=edges[0] - first,
                rows=edges[-1] - edges[0],
                first_batch=batch + (edges[0] - first) // per_batch,
                pieces=tuple(
                    Piece(group=group, start=a - base, stop=b - base)
                    for group, base, a, b in zip(
                        self._groups[begin:end].tolist(), starts, edges[:-1], edges[1:], strict=True
                    )
                ),
            )

    def permutation(self, window: Window) -> Rows:
        """Row j of the window's order is row `permutation[j]` of its concatenated pieces."""
        order = self.order
        if not order.shuffle:
            return np.arange(window.rows, dtype=np.int64)
        return permutation(window.rows, order.seed, self.epoch, window.lane, window.index)


def cursor_differences(saved: Cursor, now: Cursor) -> list[str]:
    """Settings that make a saved position invalid, one line each; without the manifest."""
    fields = ["batch_size", "shuffle", "drop_last"]
    if saved.shuffle and now.shuffle:
        fields.append("seed")
        if saved.batch_size == now.batch_size:  # which else decides both
            fields += ["lanes", "window"]
    values: list[tuple[str, Any, Any]] = [(f, getattr(saved, f), getattr(now, f)) for f in fields]
    return [f"{field} was {was}, is now {is_}" for field, was, is_ in values if was != is_]
