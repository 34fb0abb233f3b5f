"""What a bridge follows: runs as they change and, if asked for, their events. It reconnects and continues where it was.

No Qt in here. Positions outlive a connection: the last change of the registry, and the last event of each run.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.doubling_delay import DoublingDelay
from trn.client.client import AsyncClient
from trn.core.errors import NotFoundError, TrnError, UnavailableError
from trn.core.runs import TERMINAL, RunState
from trn.proto.records import Run

logger = logging.getLogger("trn.qt")

FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
ANSWER_TIMEOUT_S = 5.0
LIST_PAGE = 500
LIVE_STATES = tuple(state.value for state in RunState if state not in TERMINAL)
MAX_WAITING_EVENTS = (
    20_000  # while the GUI thread is busy; then the daemon waits, and replays from the run's file
)
MAX_ENDED_AT_ONCE = 8  # ended runs whose events are read at the same time


class ConnectionState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"  # it tries again by itself
    REFUSED = "refused"  # the daemon will not answer this request: the bridge has ended
    STOPPED = "stopped"


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to follow. The default: all runs, without events.

    - `run_ids`: only these. The name of a family means its newest run at the start.
    - `after_change`: only runs that changed after it, `Run.change` of a record. `is_live_only`: no runs that had ended.
    - `with_events`: also every event of these runs, in order. `after_seq`: of a run only those after that `seq`.
    """

    run_ids: tuple[str, ...] = ()
    after_change: int = 0
    is_live_only: bool = False
    with_events: bool = False
    after_seq: Mapping[str, int] = MappingProxyType({})


class RunEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Some events of one run, in order: the objects of its event file."""

    run_id: str
    events: tuple[dict[str, Any], ...]


class Inbox:
    """What has come and was not handed on: of each run the newest record, and every event. `open` it in each new loop."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.due: dict[str, Run] = {}  # of this round
        self.events: deque[RunEvents] = deque()
        self._num_events = 0
        self.open()

    def open(self) -> None:
        self.has_news, self.is_empty = asyncio.Event(), asyncio.Event()
        self._has_events, self._has_room = asyncio.Event(), asyncio.Event()
        self._note_amount()

    def put_run(self, run: Run) -> None:
        self.runs[run.run_id] = run
        self._note_amount()

    async def put_events(self, events: RunEvents) -> None:
        """Waits while there are too many."""
        await self._has_room.wait()
        self.events.append(events)
        self._num_events += len(events.events)
        self._note_amount()

    async def wait_for_events(self, timeout_s: float) -> None:
        """Until there are some, or for that long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_events.wait(), timeout_s)

    def take_events(self) -> RunEvents:
        taken = self.events.popleft()
        self._num_events -= len(taken.events)
        self._note_amount()
        return taken

    def begin_round(self) -> None:
        """What has come is due; what comes from now on is of the next round."""
        self.due, self.runs = self.runs, {}

    def take_run(self) -> Run:
        """The next one that is due."""
        taken = self.due.pop(next(iter(self.due)))
        self._note_amount()
        return taken

    def _note_amount(self) -> None:
        is_empty = not (self.runs or self.due or self.events)
        for event, is_so in (
            (self.has_news, not is_empty),
            (self.is_empty, is_empty),
            (self._has_events, bool(self.events)),
            (self._has_room, self._num_events < MAX_WAITING_EVENTS),
        ):
            if is_so:
                event.set()
            else:
                event.clear()


class RunStream:
    """Fills the inbox. Belongs to one event loop at a time; `follow` continues where the last one ended."""

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        request: WatchRequest,
        tell: Callable[[ConnectionState, str], None],
    ) -> None:
        self.inbox = Inbox()
        self._connect = connect
        self._request = request
        self._tell = tell
        self._run_ids: tuple[str, ...] = ()  # exact ones, once they are known
        self._change = request.after_change
        self._changes: dict[str, int] = {}  # of each of these
        self._is_begun = False
        self._seqs = dict(request.after_seq)
        self._unread: dict[str, Run] = {}  # runs whose events have not all been read

    async def follow(self) -> None:
        """Endless, across restarts of the daemon; returns if a daemon refuses the request."""
        delay = DoublingDelay(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._tell(ConnectionState.CONNECTING, "")
        while True:
            try:
                await self._follow_once(delay)
            except (TrnError, ExceptionGroup) as fault:
                first = _first(fault)
                if not isinstance(first, TrnError):
                    raise
                if not isinstance(first, UnavailableError):
                    self._tell(ConnectionState.REFUSED, str(first))
                    return
                self._tell(ConnectionState.DISCONNECTED, str(first))
            await asyncio.sleep(delay.next_s())

    async def _follow_once(self, delay: DoublingDelay) -> None:
        """Until the connection breaks: an UnavailableError, or a group with one."""
        async with self._connect() as client:
            find = self._find_runs if self._request.run_ids else self._find_all
            known = await find(client)
            change = self._change
            delay.reset()
            self._tell(ConnectionState.CONNECTED, "")
            async with asyncio.TaskGroup() as group:
                readers = _Readers(group, self, client)
                for run in list(self._unread.values()):
                    readers.read(run)
                for run in known:
                    self._take(run, readers)
                self._is_begun = True
                async with aclosing(
                    client.watch(after_change=change, run_ids=self._run_ids, is_exact=True)
                ) as runs:
                    async for run in runs:
                        self._take(run, readers)

    async def _find_runs(self, client: AsyncClient) -> list[Run]:
        """The runs that were asked for. Calls that also a run's own token allows."""
        ids = self._run_ids or self._request.run_ids
        runs = [await client.get(run_id, is_exact=bool(self._run_ids)) for run_id in ids]
        self._run_ids = tuple(run.run_id for run in runs)
        self._change = min(run.change for run in runs)  # one may have changed while the others were asked for
        for run in runs:
            is_known = run.change <= self._request.after_change or (
                self._request.is_live_only and run.is_terminal
            )
            if is_known and not self._is_begun:
                self._changes[run.run_id] = run.change
        return runs

    async def _find_all(self, client: AsyncClient) -> list[Run]:
        """At the beginning the live runs, if only these are wanted; the watch has all others."""
        health = await client.health()
        if self._change > health.last_change:  # another registry, or an older copy of it
            self._change, self._is_begun = 0, False
            self._seqs, self._unread = dict(self._request.after_seq), {}
        if self._is_begun or not self._request.is_live_only:
            return []
        live = [run async for run in client.list(states=LIVE_STATES, page_size=LIST_PAGE)]
        self._change = health.last_change
        return live

    def _take(self, run: Run, readers: "_Readers") -> None:
        self._change = max(self._change, run.change)
        if self._run_ids:
            if run.change <= self._changes.get(run.run_id, -1):
                return
            self._changes[run.run_id] = run.change
        self.inbox.put_run(run)
        if self._request.with_events and run.last_seq > self._seqs.get(run.run_id, 0):
            self._unread[run.run_id] = run
            readers.read(run)

    async def read_events(self, client: AsyncClient, run_id: str) -> None:
        """Until the run has ended. Raises if the connection breaks."""
        async with aclosing(
            client.event_lines(run_id, after_seq=self._seqs.get(run_id, 0), is_exact=True)
        ) as batches:
            async for lines in batches:
                events = tuple(map(msgspec.json.decode, lines.splitlines()))
                await self.inbox.put_events(RunEvents(run_id=run_id, events=events))
                self._seqs[run_id] = events[-1]["seq"]

    def forget(self, run_id: str) -> None:
        """All of its events were read, or it was removed."""
        self._unread.pop(run_id, None)


class _Readers:
    """One task for each run whose events are being read."""

    def __init__(self, group: asyncio.TaskGroup, stream: RunStream, client: AsyncClient) -> None:
        self._group, self._stream, self._client = group, stream, client
        self._reading: set[str] = set()
        self._ended = asyncio.Semaphore(MAX_ENDED_AT_ONCE)

    def read(self, run: Run) -> None:
        if run.run_id not in self._reading:
            self._reading.add(run.run_id)
            self._group.create_task(self._read(run))

    async def _read(self, run: Run) -> None:
        try:
            async with self._ended if run.is_terminal else contextlib.nullcontext():
                await self._stream.read_events(self._client, run.run_id)
        except NotFoundError:
            logger.info("run %s was removed while its events were read", run.run_id)
        finally:
            self._reading.discard(run.run_id)
        self._stream.forget(run.run_id)


def _first(fault: BaseException) -> BaseException:
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return fault
