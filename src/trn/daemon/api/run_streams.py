"""The streaming calls: what is stored first, then what is live, with no gap and no repeat between them.

Each takes its place in the live stream before it reads what is stored, and knows what comes twice by its number. A stream
waits in its own task until its watcher takes more; when its place drops out of the ring meanwhile, it says so.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from gen_worker.contract.files.regular import NotRegularFileError
from trn.core.errors import InvalidRequestError, TooMuchError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.api.broadcaster import EventWatch, FellBehind, Published, RunEventBroadcaster
from trn.daemon.ingest.event_file import EventBatch, replay
from trn.daemon.ingest.followed_run import file_size
from trn.executors.base import FilesByPool, RunFile
from trn.proto.records import LogChunk
from trn.registry.base import ReadableRegistry

MAX_OPEN = 16_384
MAX_WATCHED_IDS = 1000
CHUNK_BYTES = 256 << 10
PAGE = 500
LOOK_AGAIN_S = 0.5  # at a log: what a worker prints rings no bell

T = TypeVar("T")


class StreamNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream says beside runs or events: where it stands, that it fell behind, that it is at its end."""

    change: int = 0
    fell_behind: FellBehind | None = None
    is_end: bool = False


class RunStreams:
    """WatchRuns, StreamEvents and StreamLogs. Belongs to the loop's thread. `watcher` names the caller in the log."""

    def __init__(
        self, *, registry: ReadableRegistry, broadcaster: RunEventBroadcaster, files: FilesByPool, home: Home
    ) -> None:
        self._registry = registry
        self._broadcaster = broadcaster
        self._files = files
        self._home = home
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_started = 0
        self._is_stopping = False
        self._joined: tuple[tuple[str, int, int], Published[EventBatch]] | None = None

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    def end_all(self) -> None:
        """End every stream, and those that come from now on, with UnavailableError: its watcher asks again."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def place(self, is_cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Around a stream, in its task: it is counted, and ended when the daemon stops."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_stopping:
            raise UnavailableError("the daemon stops: ask its next one")
        if len(self._tasks) >= MAX_OPEN:
            raise TooMuchError(f"{MAX_OPEN} streams are open, which is the limit: close some")
        self._num_started += 1
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_stopping or is_cancelled():
                raise
            task.uncancel()
            raise UnavailableError("the daemon stops: ask its next one") from None
        finally:
            self._tasks.discard(task)

    def _name(self, watcher: str) -> str:
        return f"{watcher} (stream {self._num_started})"

    def _find(self, run_id: str, *, is_exact: bool) -> str:
        self._home.run(run_id)  # what could be no id is refused
        return self._registry.find(run_id, is_exact=is_exact).run_id

    # Runs

    async def watch_runs(
        self,
        *,
        run_ids: Sequence[str] = (),
        after_change: int = 0,
        live_only: bool = False,
        is_exact: bool = False,
        watcher: str = "",
    ) -> AsyncIterator[list[Published[RunRecord]] | StreamNote]:
        """Endless. `last` of each item is the change to continue from."""
        if len(run_ids) > MAX_WATCHED_IDS:
            raise InvalidRequestError(
                f"run_ids names {len(run_ids)} runs, the limit is {MAX_WATCHED_IDS}: leave it out to watch all of them"
            )
        ids = {self._find(run_id, is_exact=is_exact) for run_id in run_ids}
        with self._broadcaster.watch_runs(self._name(watcher)) as watch:
            change = self._registry.last_change()
            if not live_only:
                change = min(after_change, change)
                for group, complete in self._read_changed(ids, change):
                    if group:
                        yield group
                    change = complete
            yield StreamNote(change=change)
            while True:
                news = await watch.next()
                if isinstance(news, FellBehind):
                    yield StreamNote(fell_behind=news)
                    for group, complete in self._read_changed(ids, change):
                        if group:
                            yield group
                        change = complete
                    continue
                new = [item for item in news if item.last > change and (not ids or item.item.run_id in ids)]
                for group in _groups(new):
                    yield group
                if news:
                    change = max(change, news[-1].last)

    def _read_changed(self, ids: set[str], after: int) -> Iterator[tuple[list[Published[RunRecord]], int]]:
        """(runs that changed after that, the change up to which nothing is missing then)."""
        if ids:
            change = self._registry.last_change()  # first: a run that changes meanwhile comes again
            found = [self._registry.get(run_id) for run_id in sorted(ids)]
            stored = [_stored(record, after) for record in found if record.change > after]
            for group in _groups(stored):
                yield group, after
            yield [], max(change, after)
            return
        while records := self._registry.changed(after, PAGE):
            for group in _groups([_stored(record, record.change) for record in records]):
                after = group[-1].last
                yield group, after

    # Events

    async def stream_events(
        self,
        run_id: str,
        *,
        after_seq: int = 0,
        follow: bool = False,
        is_exact: bool = False,
        watcher: str = "",
    ) -> AsyncIterator[Published[EventBatch] | StreamNote]:
        run_id, seq, is_over = self._find(run_id, is_exact=is_exact), after_seq, False
        with self._broadcaster.watch_events(run_id, self._name(watcher)) as watch:
            is_stored = True
            while True:
                if is_stored:
                    record = self._registry.get(run_id)
                    async for batch in self._read_stored(record, seq):
                        yield _published(batch)
                        seq = batch.last_seq
                    is_over = record.state.is_terminal
                if is_over or not follow:
                    break
                news = await watch.next()
                is_stored = isinstance(news, FellBehind) or not news
                if isinstance(news, FellBehind):
                    missed = FellBehind(missed_from=max(news.missed_from, seq + 1), missed_to=news.missed_to)
                    yield StreamNote(fell_behind=missed)
                elif news:
                    for item in self._after(run_id, news, seq):
                        yield item
                    seq = max(seq, news[-1].last)
        if is_over:
            yield StreamNote(is_end=True)

    async def _read_stored(self, record: RunRecord, seq: int) -> AsyncIterator[EventBatch]:
        """Events after `seq` from the run's file, read in another thread."""
        if seq < record.last_seq:
            _, offset = self._registry.event_place(record.run_id, seq)
            file = self._files.of(record.needs.pool).events(record.run_id)
            batches = replay(file, seq, offset, record.event_offset, record.nonce)
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch

    def _after(
        self, run_id: str, news: Sequence[Published[EventBatch]], seq: int
    ) -> Iterator[Published[EventBatch]]:
        """What comes after `seq`; many small batches are joined to one, once for all watchers."""
        new = [item for item in news if item.last > seq]
        if new and new[0].first <= seq:  # only where the file and the ring overlap
            rest = new.pop(0).item.after(seq)
            if rest is not None:
                yield _published(rest)
        for group in _groups(new):
            if len(group) == 1:
                yield group[0]
                continue
            key = run_id, group[0].first, group[-1].last
            if self._joined is None or self._joined[0] != key:
                lines = b"".join([item.item.lines for item in group])
                joined = EventBatch(first_seq=group[0].first, last_seq=group[-1].last, lines=lines)
                self._joined = key, _published(joined)
            yield self._joined[1]

    # Logs

    async def stream_logs(
        self,
        run_id: str,
        *,
        offset: int = 0,
        follow: bool = False,
        tail_bytes: int = 0,
        is_exact: bool = False,
        watcher: str = "",
    ) -> AsyncIterator[LogChunk]:
        run_id = self._find(run_id, is_exact=is_exact)
        file = self._files.of(self._registry.get(run_id).needs.pool).log(run_id)
        with self._broadcaster.watch_events(run_id, self._name(watcher)) as watch:
            is_over = self._registry.get(run_id).state.is_terminal
            if tail_bytes:
                offset = max(0, await asyncio.to_thread(file_size, file) - tail_bytes)
            while True:
                data = await asyncio.to_thread(_read, file, offset)
                if data:
                    yield LogChunk(offset=offset, data=data)
                    offset += len(data)
                elif is_over or not follow:
                    break
                else:
                    is_over = await _rest(watch)
        yield LogChunk(offset=offset, data=b"", is_end=True)


async def _rest(watch: EventWatch) -> bool:
    """Wait for an event of the run, or a moment; whether the run has ended."""
    try:
        async with asyncio.timeout(LOOK_AGAIN_S):
            return await watch.next() == []
    except TimeoutError:
        return False


def _groups(items: Sequence[Published[T]]) -> Iterator[list[Published[T]]]:
    """Items in order, in groups of at most CHUNK_BYTES, or of one."""
    group: list[Published[T]] = []
    size_bytes = 0
    for item in items:
        if group and size_bytes + item.size_bytes > CHUNK_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(item)
        size_bytes += item.size_bytes
    if group:
        yield group


def _stored(record: RunRecord, change: int) -> Published[RunRecord]:
    record = msgspec.structs.replace(record, config={})
    return Published(record, first=change, last=change, size_bytes=len(msgspec.json.encode(record)))


def _published(batch: EventBatch) -> Published[EventBatch]:
    return Published(batch, first=batch.first_seq, last=batch.last_seq, size_bytes=len(batch.lines))


def _read(file: RunFile, offset: int) -> bytes:
    with contextlib.suppress(NotRegularFileError):
        return file.read(offset, CHUNK_BYTES)
    return b""
