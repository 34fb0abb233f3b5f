"""The streaming calls: what is stored first, then what is live, with nothing between them lost or told twice.

Each takes its place in the live stream before it reads what is stored; what comes by both ways it knows by its number.
Messages are written as bytes: what many watch is encoded once. A watcher that reads slowly waits here, in its own
task, until its connection takes more; its place in the ring may drop out meanwhile, and it is told so.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from gen_worker.contract.regular_files import NotRegularFileError, open_regular
from trn.core.errors import InvalidRequestError, TooMuchError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.api.broadcaster import EventWatch, FellBehind, Published, RunWatch
from trn.daemon.api.server import Context
from trn.daemon.ingest.event_file import EventBatch, replay
from trn.daemon.ingest.followed_run import file_size
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import run_message
from trn.proto.methods import OPEN_KEY
from trn.registry.reader import RegistryReader

MAX_OPEN = 16_384
MAX_WATCHED_IDS = 1000
CHUNK_BYTES = 256 << 10
PAGE = 500
LOOK_AGAIN_S = 0.5  # at a log: what a worker prints rings no bell


class Broadcaster(Protocol):
    def watch_events(self, run_id: str, identity: str) -> EventWatch: ...

    def watch_runs(self, identity: str) -> RunWatch: ...


class RunStreams:
    """WatchRuns, StreamEvents and StreamLogs. Belongs to the loop's thread."""

    def __init__(self, *, registry: RegistryReader, broadcaster: Broadcaster, home: Home) -> None:
        self._registry = registry
        self._broadcaster = broadcaster
        self._home = home
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_started = 0
        self._is_stopping = False
        self._joined: tuple[tuple[str, int, int], bytes] = ("", 0, 0), b""

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def end_all(self) -> None:
        """Send every watcher away, to come again; and whoever comes from now on."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    async def watch_runs(self, request: pb.WatchRunsRequest, context: Context) -> None:
        await self._carry(self._watch_runs(request, context), context)

    async def stream_events(self, request: pb.StreamEventsRequest, context: Context) -> None:
        await self._carry(self._stream_events(request, context), context)

    async def stream_logs(self, request: pb.StreamLogsRequest, context: Context) -> None:
        await self._carry(self._stream_logs(request, context), context)

    async def _carry(self, work: Coroutine[Any, Any, None], context: Context) -> None:
        """Run a stream, counted; where the daemon stops, its watcher is told to ask again."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= MAX_OPEN and not self._is_stopping:
            work.close()
            raise TooMuchError(f"{MAX_OPEN} streams are open, which is all there can be: close some")
        self._num_started += 1
        self._tasks.add(task)
        try:
            if self._is_stopping:
                raise asyncio.CancelledError
            await context.send_initial_metadata(((OPEN_KEY, "1"),))
            await work
        except asyncio.CancelledError:
            if not self._is_stopping or context.cancelled():
                raise
            task.uncancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon stops: ask its next one")
        finally:
            work.close()  # where it never began
            self._tasks.discard(task)

    def _identity(self, context: Context) -> str:
        return f"{context.peer()} (stream {self._num_started})"

    def _find(self, run_id: str, *, is_exact: bool) -> RunRecord:
        self._home.run(run_id)
        return self._registry.find(run_id, is_exact=is_exact)

    # Runs

    async def _watch_runs(self, request: pb.WatchRunsRequest, context: Context) -> None:
        if len(request.run_ids) > MAX_WATCHED_IDS:
            raise InvalidRequestError(
                f"run_ids names {len(request.run_ids)} runs, at most {MAX_WATCHED_IDS} are taken: leave it out to watch"
                " all of them"
            )
        ids = {self._find(run_id, is_exact=request.is_exact).run_id for run_id in request.run_ids}
        with self._broadcaster.watch_runs(self._identity(context)) as watch:
            change = self._registry.last_change()
            if not request.live_only:
                after = min(request.after_change, change)
                change = await self._send_stored_runs(context, ids, after)
            await context.write(pb.WatchRunsResponse(change=change).SerializeToString())
            while True:
                news = await watch.next()
                if isinstance(news, FellBehind):
                    told = pb.FellBehind(missed_from=news.missed_from, missed_to=news.missed_to)
                    await context.write(pb.WatchRunsResponse(fell_behind=told).SerializeToString())
                    change = await self._send_stored_runs(context, ids, change)
                    continue
                new = [item for item in news if item.last > change and (not ids or item.item.run_id in ids)]
                for group in _groups([_encode_run(item) for item in new]):
                    # Messages laid end to end are one message with all their runs, and the last one's `change`.
                    await context.write(b"".join(group))
                if news:
                    change = max(change, news[-1].last)

    async def _send_stored_runs(self, context: Context, ids: set[str], after: int) -> int:
        """Send runs that changed after that; the number up to which nothing is missing now."""
        if ids:
            change = (
                self._registry.last_change()
            )  # before the runs are read: one that changes meanwhile comes again
            found = [self._registry.get(run_id) for run_id in sorted(ids)]
            await self._send_runs(context, [record for record in found if record.change > after], after)
            return max(change, after)
        while records := self._registry.changed(after, PAGE):
            after = records[-1].change
            await self._send_runs(context, records, None)
        return after

    async def _send_runs(self, context: Context, records: Sequence[RunRecord], change: int | None) -> None:
        encoded = [
            pb.WatchRunsResponse(
                runs=[run_message(record)], change=record.change if change is None else change
            ).SerializeToString()
            for record in records
        ]
        for group in _groups(encoded):
            await context.write(b"".join(group))

    # Events

    async def _stream_events(self, request: pb.StreamEventsRequest, context: Context) -> None:
        run_id = self._find(request.run_id, is_exact=request.is_exact).run_id
        with self._broadcaster.watch_events(run_id, self._identity(context)) as watch:
            seq, is_over = await self._send_stored_events(context, run_id, request.after_seq)
            while request.follow and not is_over:
                news = await watch.next()
                if isinstance(news, FellBehind):
                    told = pb.FellBehind(missed_from=max(news.missed_from, seq + 1), missed_to=news.missed_to)
                    await context.write(pb.StreamEventsResponse(fell_behind=told).SerializeToString())
                if isinstance(news, FellBehind) or not news:
                    seq, is_over = await self._send_stored_events(context, run_id, seq)
                    continue
                for message in self._encode_events(run_id, news, seq):
                    await context.write(message)
                seq = max(seq, news[-1].last)
        if is_over:
            await context.write(pb.StreamEventsResponse(is_end=True).SerializeToString())

    async def _send_stored_events(self, context: Context, run_id: str, seq: int) -> tuple[int, bool]:
        """Send events after `seq` from the run's file; (the last one, whether the run has ended and that was all)."""
        record = self._registry.get(run_id)
        if seq < record.last_seq:
            _, offset = self._registry.event_place(run_id, seq)
            path = self._home.run(run_id).events
            batches = replay(path, seq, offset, record.event_offset, record.nonce)
            async for batch in _in_thread(batches):
                await context.write(_encode_batch(batch))
                seq = batch.last_seq
        return seq, record.state.is_terminal

    def _encode_events(self, run_id: str, news: Sequence[Published[EventBatch]], seq: int) -> Iterator[bytes]:
        """Messages with what comes after `seq`; many small batches are one message, made once for all watchers."""
        new = [item for item in news if item.last > seq]
        if new and new[0].first <= seq:  # only where the file and the ring overlap
            rest = new.pop(0).item.after(seq)
            if rest is not None:
                yield _encode_batch(rest)
        for group in _groups(new, size=lambda item: item.size_bytes):
            if len(group) == 1:
                only = group[0]
                if only.encoded is None:
                    only.encoded = _encode_batch(only.item)
                yield only.encoded
                continue
            key = run_id, group[0].first, group[-1].last
            if self._joined[0] != key:
                lines = b"".join([item.item.lines for item in group])
                joined = EventBatch(first_seq=group[0].first, last_seq=group[-1].last, lines=lines)
                self._joined = key, _encode_batch(joined)
            yield self._joined[1]

    # Logs

    async def _stream_logs(self, request: pb.StreamLogsRequest, context: Context) -> None:
        run_id = self._find(request.run_id, is_exact=request.is_exact).run_id
        path = self._home.run(run_id).log
        with self._broadcaster.watch_events(run_id, self._identity(context)) as watch:
            is_over = self._registry.get(run_id).state.is_terminal
            offset = request.offset
            if request.tail_bytes:
                offset = max(0, await asyncio.to_thread(file_size, path) - request.tail_bytes)
            while True:
                data = await asyncio.to_thread(_read, path, offset)
                if data:
                    await context.write(pb.StreamLogsResponse(offset=offset, data=data).SerializeToString())
                    offset += len(data)
                elif is_over or not request.follow:
                    break
                else:
                    is_over = await _rest(watch)
        await context.write(pb.StreamLogsResponse(offset=offset, is_end=True).SerializeToString())


async def _rest(watch: EventWatch) -> bool:
    """Wait for an event of the run, or a moment; whether the run has ended."""
    try:
        async with asyncio.timeout(LOOK_AGAIN_S):
            return await watch.next() == []
    except TimeoutError:
        return False


def _groups(items: Sequence[Any], *, size: Any = len) -> Iterator[list[Any]]:
    """Items in order, in groups of at most CHUNK_BYTES, or of one."""
    group: list[Any] = []
    size_bytes = 0
    for item in items:
        if group and size_bytes + size(item) > CHUNK_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += size(item)
    if group:
        yield group


def _encode_run(item: Published[RunRecord]) -> bytes:
    if item.encoded is None:
        item.encoded = pb.WatchRunsResponse(
            runs=[run_message(item.item)], change=item.last
        ).SerializeToString()
    return item.encoded


def _encode_batch(batch: EventBatch) -> bytes:
    return pb.StreamEventsResponse(
        first_seq=batch.first_seq, last_seq=batch.last_seq, lines=batch.lines
    ).SerializeToString()


async def _in_thread(batches: Iterator[EventBatch]) -> AsyncIterator[EventBatch]:
    """Read files where nobody else waits for them."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        yield batch


def _read(path: Path, offset: int) -> bytes:
    try:
        descriptor = open_regular(path)
    except (FileNotFoundError, NotRegularFileError):
        return b""
    try:
        # An offset of 64 bits may be more than the system's own can hold.
        return os.pread(descriptor, CHUNK_BYTES, min(offset, (1 << 63) - 1 - CHUNK_BYTES))
    finally:
        os.close(descriptor)
