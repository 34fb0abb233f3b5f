"""From row groups to batches for one iterator: which groups to read ahead, and how to slice or gather them."""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count, repeat

import numpy as np
import pyarrow as pa

from gen_worker.trainer.feed.gather import (
    BLOCK_ROWS,
    Fetch,
    Held,
    HeldWindow,
    empty_batch,
    gather,
    join_batches,
)
from gen_worker.trainer.feed.groups import GroupSource
from gen_worker.trainer.feed.order import GLOBAL_ROWS, DataOrder, EpochOrder, Share, Window
from gen_worker.trainer.feed.readahead import Readahead
from gen_worker.trainer.feed.tensors import BlockTensors, newest_slice

DECODE_THREADS = 2
BLOCK_BYTES = 8 << 20
MAX_BLOCKS_AHEAD = 2
# Row groups smaller than a batch are decoded in spans of about this many batches.
RANGE_BATCHES = 16
RANGE_BYTES = 8 << 20

GroupRange = tuple[int, int]  # row groups [first, last)


class BatchStream:
    """One `ArrowFeed.batches` iterator. Owns its threads, which start on first use."""

    def __init__(
        self,
        source: GroupSource,
        order: DataOrder,
        *,
        schema: pa.Schema,
        shares: Sequence[Share],
        tail_span: tuple[int, int],
        is_shared: bool,
        bytes_per_row: int,
        readahead: int,
        readahead_bytes: int,
    ) -> None:
        self._source = source
        self._order = order
        self._schema = schema
        self._shares = shares
        self._tail_span = tail_span
        self._is_shared = is_shared
        self._bytes_per_row = bytes_per_row
        self._readahead = readahead
        self._readahead_bytes = readahead_bytes
        self._is_closed = False
        self._stages: list[Readahead[GroupRange, pa.RecordBatch] | Readahead[None, pa.RecordBatch]] = []
        self._blocks_under_way: Generator[pa.RecordBatch, None, None] | None = None

    def batches(self, epoch: int, batch: int) -> Iterator[pa.RecordBatch]:
        return self._shuffled(epoch, batch) if self._order.shuffle else self._sequential(epoch, batch)

    def close(self) -> None:
        self._is_closed = True
        for stage in self._stages:  # decoders first: the gatherer may be waiting for one
            stage.close()
        if self._blocks_under_way is not None:
            with contextlib.suppress(ValueError):  # a gather that is still running
                self._blocks_under_way.close()  # frees the decoded windows
        newest_slice.place = None

    # Unshuffled: slices of decoded row groups, without a copy unless a batch crosses a border.

    def _sequential(self, epoch: int, batch: int) -> Iterator[pa.RecordBatch]:
        order = self._order
        size, full = order.batch_size, order.full_batches
        (share,) = self._shares
        width = share.stop - share.start
        ranges = self._ranges()
        range_rows = [int(order.group_starts[first]) for first, _ in ranges]
        skip = int(np.searchsorted(range_rows, batch * size, side="right")) - 1
        reader = _RowReader(
            self._reader(self._range_keys(ranges, skip)),
            starts=range_rows,
            ranges=ranges,
            num_rows=order.num_rows,
            at=epoch * len(ranges) + skip,
            empty=self._empty(),
        )
        for current in count(epoch):
            origin = current * order.num_rows
            while batch < full:
                row = origin + batch * size + share.start
                chunk = reader.seek(row)
                inside = min((reader.stop - row - width) // size + 1, full - batch)
                if inside > 0:
                    cut, first, tensors = chunk.slice, row - reader.start, BlockTensors(chunk)
                    for offset in range(first, first + inside * size, size):
                        rows = cut(offset, width)
                        newest_slice.place = rows, tensors, offset
                        yield rows
                    batch += inside
                    newest_slice.place = None
                    del cut, chunk, tensors, rows  # freed before the wait for the next one
                else:
                    yield reader.rows(row, row + width)
                    batch += 1
            if order.tail_rows:
                tail = origin + full * size
                yield self._marked(reader.rows(tail + self._tail_span[0], tail + self._tail_span[1]))
            batch = 0

    def _ranges(self) -> list[GroupRange]:
        """One row group each; several if a batch is larger than any row group."""
        order = self._order
        sizes = order.sizes.tolist()
        groups = order.groups.tolist()
        if max(sizes) >= order.batch_size:
            return [(group, group + 1) for group in groups]
        limit = min(
            RANGE_BATCHES * order.batch_size, max(RANGE_BYTES // self._bytes_per_row, order.batch_size)
        )
        ranges: list[GroupRange] = []
        rows = limit
        for group in groups:
            if rows + sizes[group] > limit:
                ranges.append((group, group + 1))
                rows = sizes[group]
            else:
                ranges[-1] = (ranges[-1][0], group + 1)
                rows += sizes[group]
        return ranges

    @staticmethod
    def _range_keys(ranges: list[GroupRange], skip: int) -> Iterator[GroupRange]:
        if len(ranges) == 1:
            yield ranges[0]  # decoded once, kept for all epochs
            return
        yield from ranges[skip:]
        while True:
            yield from ranges

    # Shuffled: windows are kept decoded, blocks of whole batches are gathered from them.

    def _shuffled(self, epoch: int, batch: int) -> Iterator[pa.RecordBatch]:
        width = sum(share.stop - share.start for share in self._shares)
        blocks = self._blocks_under_way = self._blocks(epoch, batch, self._fetcher(epoch, batch))
        gatherer: Readahead[None, pa.RecordBatch] = Readahead(
            repeat(None),
            lambda _: next(blocks),
            estimate=lambda _: 0,
            size_of=lambda block: int(block.nbytes),
            num_threads=1,
            max_items=MAX_BLOCKS_AHEAD,
            max_bytes=self._readahead_bytes,
            name="feed-gather",
        )
        self._own(gatherer)
        full, size = self._order.full_batches, self._order.batches_per_epoch
        while True:
            block = gatherer.pop()
            if batch == full:  # the tail: one block, one batch, of any width
                yield block
                batch += 1
            else:
                cut, tensors = block.slice, BlockTensors(block)
                for offset in range(0, block.num_rows, width):
                    rows = cut(offset, width)
                    newest_slice.place = rows, tensors, offset
                    yield rows
                batch += block.num_rows // width
                newest_slice.place = None
                del cut, tensors, rows
            if batch == size:
                batch = 0

    def _schedule(self, epoch: int, batch: int) -> Iterator[Window]:
        """All windows of this rank, in the order of use."""
        lanes = [share.lane for share in self._shares]
        for current in count(epoch):
            plan = self._order.epoch(current)
            if batch < self._order.full_batches:
                yield from plan.windows(lanes, batch)
            if self._order.tail_rows:
                yield from plan.windows([plan.tail_lane])
            batch = 0

    def _fetcher(self, epoch: int, batch: int) -> Fetch:
        """Decoded row groups in the order of the schedule; a repeated one is decoded once."""

        def keys() -> Iterator[GroupRange]:
            last = -1
            for window in self._schedule(epoch, batch):
                for piece in window.pieces:
                    if piece.group != last:
                        yield piece.group, piece.group + 1
                        last = piece.group
                        if len(self._order.groups) == 1:
                            return  # decoded once, kept for all epochs

        decoded = self._reader(keys())
        held: tuple[int, pa.RecordBatch | None] = -1, None

        def fetch(group: int) -> pa.RecordBatch:
            nonlocal held
            if held[0] != group:
                held = -1, None
                held = group, decoded()
            return held[1]

        return fetch

    def _blocks(self, epoch: int, batch: int, fetch: Fetch) -> Generator[pa.RecordBatch, None, None]:
        order = self._order
        lanes = [share.lane for share in self._shares]
        width = sum(share.stop - share.start for share in self._shares)
        block_batches = max(min(BLOCK_ROWS, BLOCK_BYTES // self._bytes_per_row) // width, 1)
        for current in count(epoch):
            plan = order.epoch(current)
            held: Held = {lane: deque() for lane in lanes}
            coming = plan.windows(lanes, batch) if batch < order.full_batches else iter(())
            upcoming = next(coming, None)
            while batch < order.full_batches:
                while upcoming is not None and upcoming.first_batch <= batch:
                    held[upcoming.lane].append(HeldWindow(plan, upcoming, fetch))
                    upcoming = next(coming, None)
                # A block ends before the next window, so that a window that cannot be read affects no earlier batch.
                stop = min(batch + block_batches, upcoming.first_batch if upcoming else order.full_batches)
                yield gather(held, self._shares, order.rows_per_lane, batch, stop)
                batch = stop
                for windows in held.values():
                    while windows and windows[0].stop <= batch * order.rows_per_lane:
                        windows.popleft()
            held.clear()
            if order.tail_rows:
                yield self._tail(plan, fetch)
            batch = 0

    def _tail(self, plan: EpochOrder, fetch: Fetch) -> pa.RecordBatch:
        start, stop = self._tail_span
        windows = deque(HeldWindow(plan, window, fetch) for window in plan.windows([plan.tail_lane]))
        share = Share(lane=plan.tail_lane, start=start, stop=stop)
        batch = gather({plan.tail_lane: windows}, [share], self._order.tail_rows, 0, 1) or self._empty()
        return self._marked(batch)

    # Both.

    def _marked(self, tail: pa.RecordBatch) -> pa.RecordBatch:
        """Store the rows over all ranks in the part of a short batch."""
        rows = self._order.tail_rows
        if not self._is_shared:
            return tail
        metadata = {**(tail.schema.metadata or {}), GLOBAL_ROWS: str(rows).encode()}
        return tail.replace_schema_metadata(metadata)

    def _reader(self, keys: Iterator[GroupRange]) -> Callable[[], pa.RecordBatch]:
        starts = self._order.group_starts
        decoder: Readahead[GroupRange, pa.RecordBatch] = Readahead(
            keys,
            self._load,
            estimate=lambda span: int(starts[span[1]] - starts[span[0]]) * self._bytes_per_row,
            size_of=lambda batch: int(batch.nbytes),
            num_threads=DECODE_THREADS,
            max_items=self._readahead,
            max_bytes=self._readahead_bytes,
            name="feed-decode",
        )
        self._own(decoder)
        return decoder.pop

    def _own(self, stage: Readahead[GroupRange, pa.RecordBatch] | Readahead[None, pa.RecordBatch]) -> None:
        self._stages.append(stage)
        if self._is_closed:  # by another thread meanwhile
            stage.close()

    def _load(self, span: GroupRange) -> pa.RecordBatch:
        return join_batches([self._source.read(group) for group in range(*span) if self._order.sizes[group]])

    def _empty(self) -> pa.RecordBatch:
        return empty_batch(self._schema)


class _RowReader:
    """Rows by number, forward only, over all epochs in sequence."""

    def __init__(
        self,
        decoded: Callable[[], pa.RecordBatch],
        *,
        starts: list[int],
        ranges: list[GroupRange],
        num_rows: int,
        at: int,
        empty: pa.RecordBatch,
    ) -> None:
        self._decoded = decoded
        self._starts = starts
        self._ranges = ranges
        self._num_rows = num_rows
        self._next = at
        self._chunk = empty
        self._empty = empty
        self.start = self.stop = 0

    def seek(self, row: int) -> pa.RecordBatch:
        """The chunk that holds `row`; its rows are [self.start, self.stop)."""
        while row >= self.stop:
            epoch, span = divmod(self._next, len(self._ranges))
            if len(self._ranges) > 1 or self._chunk is self._empty:
                self._chunk = self._empty  # frees it before the wait for the next
                self._chunk = self._decoded()
            self.start = epoch * self._num_rows + self._starts[span]
            self.stop = self.start + self._chunk.num_rows
            self._next += 1
        return self._chunk

    def rows(self, start: int, stop: int) -> pa.RecordBatch:
        """Rows [start, stop), copied only if they are in more than one chunk."""
        parts = []
        while start < stop:
            chunk = self.seek(start)
            end = min(stop, self.stop)
            parts.append(chunk.slice(start - self.start, end - start))
            start = end
        return join_batches(parts) if parts else self._empty
