"""Events of live runs: from their files into the registry and the metric store, exactly once, then to the watchers.

A run's file is read from the place that the stores have committed. Where they do not agree (one of them failed, or a
power cut took the metric store's last commits) it is read from the earlier place, and each takes only what is new to
it. The place moves on in memory when both have committed; it is never ahead of either, so a crash at any point
repeats work and doubles nothing.

A file may be shorter than it was: the next attempt cuts damage off its end, and a power cut may take what was not
synced. Then it is read again from a place that still stands, to where the known events now end, and goes on there.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from gen_worker.contract.failpoints import failpoint
from trn.core.errors import TrnError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.ingest.event_file import (
    Batch,
    Chunk,
    Event,
    Terminal,
    is_line_start,
    last_seq_before,
    parse,
    read_batch,
    read_terminal,
    split,
)
from trn.daemon.ingest.followed_run import Drain, FollowedRun, file_size
from trn.daemon.ingest.left_behind import LeftBehind
from trn.registry.base import Registry
from trn.registry.metrics import MetricStore, Place, Point
from trn.registry.writer import committed

logger = logging.getLogger("trn.ingest")


SWEEP_S = 1.0  # a lost ring of the doorbell costs no more than this
STORE_AGAIN_S = 30.0  # after the metric store refused
MAX_RUNS_AT_ONCE = 16


class Ingest:
    """Follows the event files of live runs. Everything here belongs to the loop's thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        metrics: MetricStore,
        broadcaster: RunEventBroadcaster,
        home: Home,
        clock: Callable[[], float] = time.monotonic,
        sweep_s: float = SWEEP_S,
        store_again_s: float = STORE_AGAIN_S,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._broadcaster = broadcaster
        self._home = home
        self._clock = clock
        self._sweep_s = sweep_s
        self._store_again_s = store_again_s
        self._left_behind = LeftBehind(registry, home, follow_once=self._follow_once, again_s=store_again_s)
        self._tails: dict[str, FollowedRun] = {}
        # Each run at most once, so it is bounded; at the end again after each batch, so nobody starves.
        self._due: asyncio.Queue[FollowedRun] = asyncio.Queue()
        self._has_tails = asyncio.Event()
        self._is_stopped = False

    def follow(self, run_id: str, number: int) -> None:
        """Begin to follow a run's file, or go on with it for another attempt."""
        tail = self._tails.get(run_id)
        if tail is None:
            tail = self._tails[run_id] = FollowedRun(run_id, self._home, number, self._clock())
            self._has_tails.set()
        tail.number, tail.grown_at = number, self._clock()
        self._queue(tail)

    def ring(self, run_id: str) -> None:
        """The run's worker has written something; anyone may ring, for any name."""
        tail = self._tails.get(run_id)
        if tail is not None:
            self._queue(tail)

    def last_growth(self, run_id: str) -> float:
        """When the file was last seen to have grown, or `follow` was called."""
        return self._tails[run_id].grown_at

    async def terminal(self, run_id: str, number: int) -> Terminal | None:
        """The attempt's terminal event, from the end of the file."""
        nonce = self._registry.get(run_id).nonce
        return await asyncio.to_thread(read_terminal, self._home.run(run_id).events, number, nonce)

    async def drain(self, run_id: str) -> None:
        """Return once everything that is in the file now is committed and published."""
        tail = self._tails[run_id]
        if self._is_stopped:
            raise UnavailableError("the ingest has stopped")
        drain = Drain(tail, file_size(tail.path))
        tail.drains.append(drain)
        self._queue(tail)
        try:
            await drain.done
        finally:
            if drain in tail.drains:
                tail.drains.remove(drain)

    async def unfollow(self, run_id: str) -> None:
        """Drain once more, and forget the run."""
        tail = self._tails.get(run_id)
        if tail is None:
            return
        await self.drain(run_id)
        self._tails.pop(run_id, None)
        if not self._tails:
            self._has_tails.clear()
        if tail.is_store_behind:
            self._left_behind.add(run_id)
        if tail.damaged.num_lines > tail.num_damaged_told:
            logger.warning("run %s: %d lines in all were put aside", tail.run_id, tail.damaged.num_lines)

    async def _follow_once(self, run: RunRecord) -> None:
        self.follow(run.run_id, run.attempt)
        await self.unfollow(run.run_id)

    async def run(self) -> None:
        """Take in what is due, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(MAX_RUNS_AT_ONCE):
                    tasks.create_task(self._work())
                tasks.create_task(self._left_behind.run())
                await self._sweep()
        finally:
            self._is_stopped = True
            for tail in self._tails.values():
                for drain in tail.drains:
                    if not drain.done.done():
                        drain.done.set_exception(UnavailableError("the ingest has stopped"))

    async def _sweep(self) -> None:
        while True:
            await self._has_tails.wait()
            await asyncio.sleep(self._sweep_s)
            for tail in self._tails.values():
                if tail.is_store_behind and not tail.is_busy and self._clock() >= tail.store_again_at:
                    tail.is_store_behind = tail.is_open = False  # reads again from where the store stands
                    self._queue(tail)
                if tail.fault or tail.drains or file_size(tail.path) != tail.size_bytes:
                    self._queue(tail)

    def _queue(self, tail: FollowedRun) -> None:
        if tail.is_busy:
            tail.is_rung = True
        elif not tail.is_queued:
            tail.is_queued = True
            self._due.put_nowait(tail)

    async def _work(self) -> None:
        while True:
            tail = await self._due.get()
            if self._tails.get(tail.run_id) is not tail:
                continue
            tail.is_queued, tail.is_busy, tail.is_rung = False, True, False
            has_more = False
            try:
                has_more = await self._take(tail)
                tail.fault = ""
            except (
                Exception
            ) as fault:  # one run's trouble is not the others'; nothing was lost, the sweep tries again
                self._warn(tail, fault)
                if not isinstance(
                    fault, TrnError
                ):  # a registry that cannot be written is waited for: ends need it, too
                    for drain in tail.drains:
                        if not drain.done.done():
                            drain.done.set_exception(fault)
            finally:
                tail.is_busy = False
            if has_more or (tail.is_rung and not tail.fault):
                self._queue(tail)

    def _warn(self, tail: FollowedRun, fault: Exception) -> None:
        if tail.fault != str(fault) or not tail.fault:
            tail.fault = str(fault) or repr(fault)
            is_ours = not isinstance(fault, TrnError | OSError)
            logger.warning(
                "events of run %s cannot be taken in: %s; will try again",
                tail.run_id,
                fault,
                exc_info=is_ours,
            )

    async def _take(self, tail: FollowedRun) -> bool:
        """Take in one batch; whether there is more to do for this run at once."""
        if not tail.is_open:
            await self._open(tail)
        tail.num_reads += 1
        batch = await asyncio.to_thread(read_batch, tail.path, tail.offset)
        if batch.size_bytes != tail.size_bytes:
            if batch.size_bytes > tail.size_bytes >= 0:
                tail.grown_at = self._clock()
            tail.size_bytes = batch.size_bytes
        if batch.is_cut:
            await self._go_back(tail)
            return True
        failpoint("ingest.read")
        chunks = await self._parse(tail, batch)
        is_odd = chunks and (chunks[0].num_missing or chunks[0].damaged)
        if is_odd and await _last_seq(tail, tail.event_end) != tail.read_seq:
            await self._go_back(tail)  # it was cut and has grown beyond the place since
            return True
        await self._tell_oddities(tail, batch, chunks)
        events = [event for chunk in chunks for event in chunk.events]
        if tail.is_returning:
            await self._return(tail, batch, chunks)
        if events:
            await self._commit(tail, chunks, events)
        tail.offset = batch.next_offset
        for drain in tail.drains:
            if not drain.done.done() and drain.is_over(tail, batch):
                drain.done.set_result(None)
        return not batch.is_end

    async def _parse(self, tail: FollowedRun, batch: Batch) -> list[Chunk]:
        chunks: list[Chunk] = []
        seq = tail.read_seq
        for start, lines in split(batch.lines):
            if chunks:
                await asyncio.sleep(0)  # others have the loop between two chunks
            chunk = parse(lines, batch.offset + start, seq, tail.nonce)
            seq = chunk.events[-1].seq if chunk.events else seq
            chunks.append(chunk)
        return chunks

    async def _tell_oddities(self, tail: FollowedRun, batch: Batch, chunks: list[Chunk]) -> None:
        """Numbers that are missing, and lines that are no events: the latter are put aside."""
        num_missing = sum(chunk.num_missing for chunk in chunks)
        if num_missing and not tail.is_returning:
            logger.warning(
                "run %s: %d events are missing after number %d", tail.run_id, num_missing, tail.read_seq
            )
        damaged = [*batch.damaged, *(damage for chunk in chunks for damage in chunk.damaged)]
        if not damaged:
            return
        try:
            await asyncio.to_thread(tail.damaged.add, damaged)
        except OSError as fault:
            logger.warning("run %s: damaged lines could not be kept: %s", tail.run_id, fault)
        if not tail.num_damaged_told:
            tail.num_damaged_told = len(damaged)
            logger.warning(
                "run %s: %d lines of its events are no events; put aside in %s (the first is at byte %d and %s)",
                tail.run_id,
                len(damaged),
                self._home.run(tail.run_id).damaged_events.name,
                damaged[0].offset,
                damaged[0].reason,
            )

    async def _commit(self, tail: FollowedRun, chunks: list[Chunk], events: list[Event]) -> None:
        """Into both stores, each what is new to it; what the registry has committed is published."""
        last_seq = events[-1].seq
        end = next(chunk.ends[-1] for chunk in reversed(chunks) if chunk.events)
        points = [
            (event.seq, event.attempt, name, event.step or 0, value, event.timestamp_ms)
            for event in events
            for name, value in event.points()
        ]
        storing = followed = None
        if last_seq > tail.metrics_seq and not tail.is_store_behind:
            storing = self._metrics.add(tail.run_id, offset=end, last_seq=last_seq, points=points)
        if last_seq > tail.registry_seq:
            followed = self._follow(tail, end, events, points)
        error: Exception | None = None
        if followed is not None:
            try:
                await committed(followed)
            except Exception as fault:  # the metric store may have taken it none the less
                error = fault
            else:
                failpoint("ingest.committed")
                self._publish(tail, chunks)
                tail.registry_seq, tail.stored_seq = last_seq, max(last_seq, tail.stored_seq)
        if storing is not None:
            try:
                await committed(storing)
            except TrnError as fault:  # points are for charts: the run goes on, and they follow from its file
                self._leave_store_behind(tail, fault)
            else:
                tail.metrics_seq = last_seq
        if error is not None:
            raise error
        tail.event_end, tail.read_seq = end, last_seq

    def _leave_store_behind(self, tail: FollowedRun, fault: Exception) -> None:
        if not tail.is_store_behind:
            logger.warning("metric points of run %s cannot be stored: %s; will try again", tail.run_id, fault)
        tail.is_store_behind = True
        tail.store_again_at = self._clock() + self._store_again_s

    def _follow(
        self, tail: FollowedRun, offset: int, events: list[Event], points: list[Point]
    ) -> "Future[RunRecord]":
        known, end_step, heartbeat_ms = tail.registry_seq, None, 0
        for event in events:
            if event.seq > known:
                tail.step = _step_after(event, tail.step)
                if event.attempt == tail.number:
                    heartbeat_ms = max(heartbeat_ms, event.timestamp_ms)
                if event.end_step is not None or event.max_steps is not None:
                    end_step = event.max_steps if event.end_step is None else event.end_step
        return self._registry.follow(
            tail.run_id,
            tail.number,
            offset=offset,
            last_seq=max(events[-1].seq, tail.stored_seq),
            step=tail.step,
            heartbeat_ms=heartbeat_ms,
            metrics={name: value for seq, _, name, _, value, _ in points if seq > known},
            end_step=end_step,
        )

    def _publish(self, tail: FollowedRun, chunks: list[Chunk]) -> None:
        if not self._broadcaster.is_watched(tail.run_id):
            return
        for chunk in chunks:
            fresh = chunk.batch.after(tail.registry_seq) if chunk.events else None
            if fresh is not None:
                self._broadcaster.publish_events(tail.run_id, fresh)

    async def _open(self, tail: FollowedRun) -> None:
        """Find the place from which to read: the earlier one of what the two stores have."""
        run = self._registry.get(tail.run_id)
        stored = self._metrics.place(tail.run_id)
        tail.step, tail.stored_seq, tail.metrics_seq = run.step, run.last_seq, stored.last_seq
        tail.offset = tail.event_end = run.event_offset
        tail.registry_seq = tail.read_seq = run.last_seq
        tail.nonce = run.nonce
        found_seq = await _last_seq(tail, run.event_offset)
        is_between = await asyncio.to_thread(is_line_start, tail.path, run.event_offset)
        if not is_between or found_seq > run.last_seq:
            await self._go_back(tail)
        else:
            # By the file's own numbers: where it has lost some, they are used again.
            tail.registry_seq = tail.read_seq = found_seq
            if stored.offset < run.event_offset:
                await self._catch_up(tail, stored)
            elif not await _stands(tail, stored):
                place = Place(run.event_offset, tail.registry_seq)
                await committed(self._metrics.rewind(tail.run_id, place))
                tail.metrics_seq = place.last_seq
        tail.is_open = True

    async def _catch_up(self, tail: FollowedRun, stored: Place) -> None:
        """The metric store is behind: read what it missed first."""
        is_there = await _stands(tail, stored)
        tail.move_to(stored if is_there else await self._known_place(tail, stored.last_seq))

    async def _go_back(self, tail: FollowedRun) -> None:
        """The file is not what it was: read again what is known, from a place that still stands."""
        tail.move_to(await self._known_place(tail, min(tail.registry_seq, tail.metrics_seq)))
        tail.is_returning = True

    async def _known_place(self, tail: FollowedRun, seq: int) -> Place:
        while True:
            seq, offset = self._registry.event_place(tail.run_id, seq)
            place = Place(offset, seq)
            if offset == 0 or await _stands(tail, place):
                return place
            seq -= 1

    async def _return(self, tail: FollowedRun, batch: Batch, chunks: list[Chunk]) -> None:
        """Look in a batch for the end of what the registry knows; from there the run is followed again."""
        known_seq, end = tail.read_seq, tail.event_end
        is_found = batch.is_end
        for chunk in chunks:
            end = chunk.end_of(tail.registry_seq) or end
            for event in chunk.events:
                if event.seq <= tail.registry_seq:
                    known_seq = event.seq
                else:
                    is_found = True
        if not is_found:
            return
        place = Place(end, known_seq)
        if known_seq < tail.registry_seq:
            logger.warning(
                "run %s: its events file has lost what came after number %d; %d was known",
                tail.run_id,
                known_seq,
                tail.registry_seq,
            )
        if known_seq < tail.metrics_seq:
            await committed(self._metrics.rewind(tail.run_id, place))
            tail.metrics_seq = known_seq
        # Last: with the registry's old place, all this would be done again.
        await committed(self._registry.rewind(tail.run_id, place.offset))
        tail.registry_seq, tail.is_returning = known_seq, False


def _step_after(event: Event, step: int) -> int:
    """The run's step after this event. A checkpoint is durable only later: it names a step that may lie behind."""
    if event.step is None:
        return step
    return max(step, event.step) if event.event == "checkpoint" else event.step


# No file of a run is opened in the loop's thread: a slow disk must not hold up everybody.


async def _last_seq(tail: FollowedRun, offset: int) -> int:
    return await asyncio.to_thread(last_seq_before, tail.path, offset, tail.nonce)


async def _stands(tail: FollowedRun, place: Place) -> bool:
    is_between = await asyncio.to_thread(is_line_start, tail.path, place.offset)
    return is_between and await _last_seq(tail, place.offset) == place.last_seq
