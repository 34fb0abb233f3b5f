"""Row groups in, batches out, for one iterator: which groups to read ahead, and how to cut or gather them."""

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

DECODE_THREADS = 2
BLOCK_BYTES = 8 << 20
MAX_BLOCKS_AHEAD = 2
# Row groups smaller than a batch are decoded in runs of about this many batches.
RUN_BATCHES = 16
RUN_BYTES = 8 << 20

Run = tuple[int, int]  # row groups [first, last)


class BatchStream:
    """The machinery behind one `ArrowFeed.batches` iterator; owns its threads, which start on first use."""

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
        self._stages: list[Readahead[Run, pa.RecordBatch] | Readahead[None, pa.RecordBatch]] = []
        self._blocks_under_way: Generator[pa.RecordBatch, None, None] | None = None

    @property
    def readahead_bytes_held(self) -> int:
        return sum(stage.held_bytes for stage in self._stages)

    def batches(self, epoch: int, batch: int) -> Iterator[pa.RecordBatch]:
        return self._shuffled(epoch, batch) if self._order.shuffle else self._sequential(epoch, batch)

    def close(self) -> None:
        self._is_closed = True
        for stage in self._stages:  # decoders first: the gatherer may be waiting for one
            stage.close()
        if self._blocks_under_way is not None:
            with contextlib.suppress(ValueError):  # a gather that outlived the wait for its thread
                self._blocks_under_way.close()  # its frame holds the decoded windows

    # Unshuffled: slices of decoded row groups, without a copy unless a batch crosses a border.

    def _sequential(self, epoch: int, batch: int) -> Iterator[pa.RecordBatch]:
        order = self._order
        size, full = order.batch_size, order.full_batches
        (share,) = self._shares
        width = share.stop - share.start
        runs = self._runs()
        run_rows = [int(order.group_starts[first]) for first, _ in runs]
        skip = int(np.searchsorted(run_rows, batch * size, side="right")) - 1
        reader = _RowReader(
            self._reader(self._run_keys(runs, skip)),
            starts=run_rows,
            runs=runs,
            num_rows=order.num_rows,
            at=epoch * len(runs) + skip,
            empty=self._empty(),
        )
        for current in count(epoch):
            origin = current * order.num_rows
            while batch < full:
                row = origin + batch * size + share.start
                chunk = reader.seek(row)
                inside = min((reader.stop - row - width) // size + 1, full - batch)
                if inside > 0:
                    cut, first = chunk.slice, row - reader.start
                    for offset in range(first, first + inside * size, size):
                        yield cut(offset, width)
                    batch += inside
                    del cut, chunk  # so that it is free while the next one is waited for
                else:
                    yield reader.rows(row, row + width)
                    batch += 1
            if order.tail_rows:
                tail = origin + full * size
                yield self._marked(reader.rows(tail + self._tail_span[0], tail + self._tail_span[1]))
            batch = 0

    def _runs(self) -> list[Run]:
        """One row group each; several where no batch fits in one anyway."""
        order = self._order
        sizes = order.sizes.tolist()
        groups = order.groups.tolist()
        if max(sizes) >= order.batch_size:
            return [(group, group + 1) for group in groups]
        limit = min(RUN_BATCHES * order.batch_size, max(RUN_BYTES // self._bytes_per_row, order.batch_size))
        runs: list[Run] = []
        rows = limit
        for group in groups:
            if rows + sizes[group] > limit:
                runs.append((group, group + 1))
                rows = sizes[group]
            else:
                runs[-1] = (runs[-1][0], group + 1)
                rows += sizes[group]
        return runs

    @staticmethod
    def _run_keys(runs: list[Run], skip: int) -> Iterator[Run]:
        if len(runs) == 1:
            yield runs[0]  # decoded once, kept for all epochs
            return
        yield from runs[skip:]
        while True:
            yield from runs

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
                cut = block.slice
                for offset in range(0, block.num_rows, width):
                    yield cut(offset, width)
                batch += block.num_rows // width
            if batch == size:
                batch = 0

    def _schedule(self, epoch: int, batch: int) -> Iterator[Window]:
        """Every window this rank needs, in the order it needs them."""
        lanes = [share.lane for share in self._shares]
        for current in count(epoch):
            plan = self._order.epoch(current)
            if batch < self._order.full_batches:
                yield from plan.windows(lanes, batch)
            if self._order.tail_rows:
                yield from plan.windows([plan.tail_lane])
            batch = 0

    def _fetcher(self, epoch: int, batch: int) -> Fetch:
        """Decoded row groups in the order of the schedule; one that is asked for twice in a row comes once."""

        def keys() -> Iterator[Run]:
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
                # A block ends where another window is needed, so a window that cannot be read spoils no
                # batch before its own.
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
        """Of a batch that ranks share unevenly, each part says how many rows there are in all."""
        rows = self._order.tail_rows
        if not self._is_shared:
            return tail
        metadata = {**(tail.schema.metadata or {}), GLOBAL_ROWS: str(rows).encode()}
        return tail.replace_schema_metadata(metadata)

    def _reader(self, keys: Iterator[Run]) -> Callable[[], pa.RecordBatch]:
        starts = self._order.group_starts
        decoder: Readahead[Run, pa.RecordBatch] = Readahead(
            keys,
            self._load,
            estimate=lambda run: int(starts[run[1]] - starts[run[0]]) * self._bytes_per_row,
            size_of=lambda batch: int(batch.nbytes),
            num_threads=DECODE_THREADS,
            max_items=self._readahead,
            max_bytes=self._readahead_bytes,
            name="feed-decode",
        )
        self._own(decoder)
        return decoder.pop

    def _own(self, stage: Readahead[Run, pa.RecordBatch] | Readahead[None, pa.RecordBatch]) -> None:
        self._stages.append(stage)
        if self._is_closed:  # closed from another thread while this stage was being made
            stage.close()

    def _load(self, run: Run) -> pa.RecordBatch:
        return join_batches([self._source.read(group) for group in range(*run) if self._order.sizes[group]])

    def _empty(self) -> pa.RecordBatch:
        return empty_batch(self._schema)


class _RowReader:
    """Rows by number, forward only, over the endless concatenation of all epochs."""

    def __init__(
        self,
        decoded: Callable[[], pa.RecordBatch],
        *,
        starts: list[int],
        runs: list[Run],
        num_rows: int,
        at: int,
        empty: pa.RecordBatch,
    ) -> None:
        self._decoded = decoded
        self._starts = starts
        self._runs = runs
        self._num_rows = num_rows
        self._next = at
        self._chunk = empty
        self._empty = empty
        self.start = self.stop = 0

    def seek(self, row: int) -> pa.RecordBatch:
        """The chunk that holds `row`; its rows are [self.start, self.stop)."""
        while row >= self.stop:
            epoch, run = divmod(self._next, len(self._runs))
            if len(self._runs) > 1 or self._chunk is self._empty:
                self._chunk = self._empty  # freed before the wait for the next
                self._chunk = self._decoded()
            self.start = epoch * self._num_rows + self._starts[run]
            self.stop = self.start + self._chunk.num_rows
            self._next += 1
        return self._chunk

    def rows(self, start: int, stop: int) -> pa.RecordBatch:
        """Rows [start, stop), copied only if they come from more than one chunk."""
        parts = []
        while start < stop:
            chunk = self.seek(start)
            end = min(stop, self.stop)
            parts.append(chunk.slice(start - self.start, end - start))
            start = end
        return join_batches(parts) if parts else self._empty
