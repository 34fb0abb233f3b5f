"""Live streams: what was committed, published to watchers. Nothing ever waits for a watcher.

A topic (one run's events; the changes of all runs) has one bounded ring of what was published last, and each of its
watchers a place in it. A watcher whose place has dropped out of the ring learns which numbers it missed, reads those
from the run's file or the registry, and continues. Since things are published after they are committed, and a watcher
takes its place before it reads what is stored, there is no gap between the two; what it gets twice it knows by number.
"""

import asyncio
import contextlib
import logging
from collections import deque
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec

from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import EventBatch
from trn.registry.base import ReadableRegistry

logger = logging.getLogger("trn.broadcaster")

FAULT_PAUSE_S = 1.0
READ_EVERY_S = 0.005  # changes that come closer together are read together; the first after a pause at once

MAX_ITEMS = 1024
MAX_BYTES = 8 << 20
PAGE = 500

T = TypeVar("T")


class Published(Generic[T]):
    """An item of a ring, shared by all watchers. `encoded` is filled by the first: it is serialised once."""

    __slots__ = ("encoded", "first", "item", "last", "size_bytes")

    def __init__(self, item: T, *, first: int, last: int, size_bytes: int) -> None:
        self.item = item
        self.first = first  # its numbers: of events, or of the change
        self.last = last
        self.size_bytes = size_bytes
        self.encoded: bytes | None = None


class FellBehind(msgspec.Struct, frozen=True, kw_only=True):
    """The watcher was too slow: these numbers, both included, are to be read from what is stored."""

    missed_from: int
    missed_to: int


class _Ring(Generic[T]):
    """The last things of one topic. Things are counted from 0; `begin` is the oldest one kept, `end` the next one."""

    def __init__(self, topic: str, *, max_items: int, max_bytes: int) -> None:
        self.topic = topic
        self.items: deque[Published[T]] = deque()
        self.begin = 0
        self.end = 0
        self.origin: int | None = None  # the number before the first that was ever published
        self.last = 0
        self.is_ended = False
        self.watches: set[Watch[T]] = set()
        self._size_bytes = 0
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._news = asyncio.Event()
        self._slowest = 0  # no watcher that keeps up has a place before this one

    def publish(self, item: Published[T]) -> None:
        if self.origin is None:
            self.origin = item.first - 1
        self.items.append(item)
        self.end += 1
        self.last = item.last
        self._size_bytes += item.size_bytes
        while len(self.items) > self._max_items or (
            self._size_bytes > self._max_bytes and len(self.items) > 1
        ):
            self._size_bytes -= self.items.popleft().size_bytes
            self.begin += 1
        if self.begin > self._slowest:
            self._warn_of_slow()
        self.wake()

    def wake(self) -> None:
        """Wake the watchers that wait."""
        self._news.set()
        self._news.clear()

    async def wait(self) -> None:
        await self._news.wait()

    def _warn_of_slow(self) -> None:
        for watch in self.watches:
            watch.check_place()
        self._slowest = min((watch.place for watch in self.watches if not watch.is_behind), default=self.end)


class Watch(Generic[T]):
    """One watcher of one topic; a context. Used by one task, in the loop's thread."""

    def __init__(self, ring: _Ring[T], identity: str, broadcaster: "RunEventBroadcaster") -> None:
        self._ring = ring
        self._identity = identity
        self._broadcaster = broadcaster
        self._last: int | None = ring.last if ring.end else None
        self.place = ring.end
        self.is_behind = False
        ring.watches.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Safe to call twice."""
        self._ring.watches.discard(self)
        self._broadcaster.forget(self._ring.topic)

    async def next(self) -> list[Published[T]] | FellBehind:
        """All that is new, at once, or what was missed; waits for something. Empty: the run has ended, that was all."""
        ring = self._ring
        while self.place == ring.end and not ring.is_ended:
            await ring.wait()
        if self.place < ring.begin:
            return self._catch_up()
        skip = self.place - ring.begin
        new = list(ring.items) if skip == 0 else [ring.items[at] for at in range(skip, len(ring.items))]
        if new:
            self.place, self._last = ring.end, new[-1].last
        return new

    def check_place(self) -> None:
        """Say so, once, where this watcher's place has dropped out of the ring."""
        if self.place < self._ring.begin and not self.is_behind:
            self.is_behind = True
            logger.warning(
                "the watcher %s of %s fell behind: it has %d and the newest is %d; it reads what it missed from the store",
                self._identity,
                self._ring.topic,
                self._seen,
                self._ring.last,
            )

    @property
    def _seen(self) -> int:
        return (self._ring.origin or 0) if self._last is None else self._last

    def _catch_up(self) -> FellBehind:
        missed = FellBehind(missed_from=self._seen + 1, missed_to=self._ring.last)
        self.place, self._last, self.is_behind = self._ring.end, self._ring.last, False
        return missed


EventWatch = Watch[EventBatch]
RunWatch = Watch[RunRecord]

_RUNS = "all runs"


class RunEventBroadcaster:
    """All live streams of the daemon. Everything but `run_changed` belongs to the loop's thread."""

    def __init__(
        self, registry: ReadableRegistry, *, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._registry = registry
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._events: dict[str, _Ring[EventBatch]] = {}
        self._runs: _Ring[RunRecord] | None = None
        self._change = 0  # the last one that the pump has seen
        self._is_woken = False
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_watchers(self) -> int:
        num_runs = 0 if self._runs is None else len(self._runs.watches)
        return num_runs + sum(len(ring.watches) for ring in self._events.values())

    def watch_events(self, run_id: str, identity: str) -> EventWatch:
        """Events of a run that are committed from now on."""
        self._begin()
        ring = self._events.get(run_id)
        if ring is None:
            ring = self._events[run_id] = _Ring(run_id, max_items=self._max_items, max_bytes=self._max_bytes)
        self._wake.set()  # a commit just before this one may have seen no watcher
        return Watch(ring, identity, self)

    def watch_runs(self, identity: str) -> RunWatch:
        """Runs that change from now on, each as it is by then: of several changes in a row only the last comes."""
        self._begin()
        if self._runs is None:
            self._runs = _Ring(_RUNS, max_items=self._max_items, max_bytes=self._max_bytes)
        self._wake.set()
        return Watch(self._runs, identity, self)

    def is_watched(self, run_id: str) -> bool:
        return run_id in self._events

    def publish_events(self, run_id: str, batch: EventBatch) -> None:
        """Tell the run's watchers, if there are any. After the commit."""
        ring = self._events.get(run_id)
        if ring is not None:
            ring.publish(
                Published(batch, first=batch.first_seq, last=batch.last_seq, size_bytes=len(batch.lines))
            )

    def run_changed(self) -> None:
        """Something was committed. Any thread; many calls are one wake."""
        loop = self._loop
        if self._is_woken or loop is None or (self._runs is None and not self._events):
            return  # also without watchers: a new one reads the registry first
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Read what changed, once for all watchers, each time something was committed."""
        loop = self._loop = asyncio.get_running_loop()
        self._wake.set()
        next_read_at = loop.time()
        while True:
            await self._wake.wait()
            if (pause_s := next_read_at - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            next_read_at = loop.time() + READ_EVERY_S
            self._wake.clear()
            self._is_woken = False  # before the read: what is committed from here on wakes again
            try:
                has_more = self._pump()
            except Exception:
                logger.exception("what changed could not be read; trying again")
                await asyncio.sleep(FAULT_PAUSE_S)
                has_more = True
            if has_more:
                self._wake.set()
                await asyncio.sleep(0)

    def _pump(self) -> bool:
        """Publish a page of changed runs; whether there may be more."""
        if self._runs is None and not self._events:
            return False
        records = self._registry.changed(self._change, PAGE)
        for record in records:
            if self._runs is not None:
                size_bytes = len(msgspec.json.encode(record))
                change = record.change
                self._runs.publish(Published(record, first=change, last=change, size_bytes=size_bytes))
            ring = self._events.get(record.run_id)
            if ring is not None and record.state.is_terminal:
                ring.is_ended = True
                ring.wake()
        if records:
            self._change = records[-1].change
        return len(records) == PAGE

    def _begin(self) -> None:
        """With the first watcher: earlier changes are not news."""
        if self._runs is None and not self._events:
            self._change = self._registry.last_change()

    def forget(self, topic: str) -> None:
        """Drop a topic without watchers."""
        ring = self._events.get(topic)
        if ring is not None and not ring.watches:
            del self._events[topic]
        if self._runs is not None and not self._runs.watches:
            self._runs = None
