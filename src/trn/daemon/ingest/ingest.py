"""Reads the events of live runs into the registry and the metric store, exactly once, then publishes them to watchers.

A run's file is read from the place that the stores have committed. If they differ (one failed, or a power cut took the
last commits of the metric store), it is read from the earlier place, and each store takes only what is new to it. The
place in memory moves after both commits. So a crash at any point repeats work and stores nothing twice.

A file may become shorter: the next attempt cuts damaged lines off its end, and a power cut may take what was not synced.
Then it is read again from a place that is still valid up to the last known event, and continues there.

Files that events name are recorded with the events and looked at afterwards: see `artifact_intake`.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from gen_worker.contract.failpoints import failpoint
from trn.core.artifacts.records import NamedFile
from trn.core.errors import TrnError, UnavailableError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.ingest.artifact_intake import ArtifactIntake
from trn.daemon.ingest.event_file import (
    Batch,
    Chunk,
    Event,
    Terminal,
    parse,
    read_batch,
    read_terminal,
    split,
)
from trn.daemon.ingest.followed_run import (
    DamagedLines,
    Drain,
    FollowedRun,
    file_size,
    is_between_lines,
    is_valid,
    last_seq,
)
from trn.daemon.ingest.metric_backlog import MetricBacklog
from trn.daemon.ingest.server_events import read_server_events
from trn.executors.base import FilesByPool, RunFile
from trn.registry.base import Registry
from trn.registry.metrics import MetricStore, Place, Point
from trn.registry.serving.served import ServerEvent
from trn.registry.writer import committed

logger = logging.getLogger("trn.ingest")

SWEEP_S = 1.0  # finds growth whose doorbell message was lost
STORE_AGAIN_S = 30.0  # after the metric store failed
MAX_RUNS_AT_ONCE = 16


class Ingest:
    """Follows the event files of live runs. From the loop's thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        metrics: MetricStore,
        broadcaster: RunEventBroadcaster,
        files: FilesByPool,
        home: Home,
        clock: Callable[[], float] = time.monotonic,
        sweep_s: float = SWEEP_S,
        store_again_s: float = STORE_AGAIN_S,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._broadcaster = broadcaster
        self._files = files
        self._home = home
        self._clock = clock
        self._sweep_s = sweep_s
        self._store_again_s = store_again_s
        self._backlog = MetricBacklog(
            registry, metrics, home, files, follow_once=self._follow_once, retry_s=store_again_s
        )
        self._artifacts = ArtifactIntake(registry=registry, home=home, retry_s=sweep_s)
        self._tails: dict[str, FollowedRun] = {}
        # Bounded: each run at most once. A run is queued again at the end after each batch, so none starves.
        self._due: asyncio.Queue[FollowedRun] = asyncio.Queue()
        self._has_tails = asyncio.Event()
        self._is_stopped = False
        # Called with the run of a server once what it said is committed. Set by the assembler.
        self.on_server_event: Callable[[str], None] = lambda _run_id: None

    def follow(self, run_id: str, number: int) -> None:
        """Start to follow a run's file, or continue with another attempt."""
        tail = self._tails.get(run_id)
        if tail is None:
            tail = self._tails[run_id] = FollowedRun(
                run_id,
                self._events(self._registry.get(run_id)),
                DamagedLines(self._home.run(run_id).damaged_events),
                number,
                self._clock(),
            )
            self._has_tails.set()
        tail.number, tail.grown_at = number, self._clock()
        self._queue(tail)

    def ring(self, run_id: str) -> None:
        """The run's worker may have written something. Any name is accepted."""
        tail = self._tails.get(run_id)
        if tail is not None:
            self._queue(tail)

    def last_growth(self, run_id: str) -> float:
        """When the file last grew, or `follow` was called."""
        return self._tails[run_id].grown_at

    async def terminal(self, run_id: str, number: int) -> Terminal | None:
        """The attempt's terminal event, from the end of the file."""
        tail = self._tails.get(run_id)
        if tail is None or not tail.is_open:
            run = self._registry.get(run_id)
            return await asyncio.to_thread(read_terminal, self._events(run), number, run.nonce)
        return await asyncio.to_thread(read_terminal, tail.file, number, tail.nonce)

    def _events(self, run: RunRecord) -> RunFile:
        return self._files.of(run.needs.pool).events(run.run_id)

    async def drain(self, run_id: str) -> None:
        """Wait until everything that is in the file now is committed and published."""
        tail = self._tails[run_id]
        if self._is_stopped:
            raise UnavailableError("the ingest has stopped")
        size_bytes = file_size(tail.file)
        if tail.is_idle and tail.offset == tail.size_bytes == size_bytes:
            return
        drain = Drain(tail, size_bytes)
        tail.drains.append(drain)
        self._queue(tail)
        try:
            await drain.done
        finally:
            if drain in tail.drains:
                tail.drains.remove(drain)

    async def unfollow(self, run_id: str) -> None:
        """Drain once more, check the files that its events named, and forget the run."""
        tail = self._tails.get(run_id)
        if tail is None:
            return
        await self.drain(run_id)
        await self._artifacts.settle(run_id)
        self._tails.pop(run_id, None)
        if not self._tails:
            self._has_tails.clear()
        if tail.is_store_behind:
            self._backlog.add(run_id)
        if tail.damaged.num_lines > tail.num_damaged_logged:
            logger.warning("run %s: %d damaged lines in total", tail.run_id, tail.damaged.num_lines)

    async def _follow_once(self, run: RunRecord) -> None:
        self.follow(run.run_id, run.attempt)
        await self.unfollow(run.run_id)

    async def run(self) -> None:
        """Ingest until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(MAX_RUNS_AT_ONCE):
                    tasks.create_task(self._work())
                tasks.create_task(self._backlog.run())
                tasks.create_task(self._artifacts.run())
                tasks.create_task(self._backlog.build_buckets())
                await self._sweep()
        finally:
            self._is_stopped = True
            for tail in self._tails.values():
                tail.fail_drains(UnavailableError("the ingest has stopped"))

    async def _sweep(self) -> None:
        while True:
            await self._has_tails.wait()
            await asyncio.sleep(self._sweep_s)
            for tail in self._tails.values():
                if tail.is_store_behind and not tail.is_busy and self._clock() >= tail.store_again_at:
                    tail.is_store_behind = tail.is_open = False  # read again from the store's place
                    self._queue(tail)
                if tail.fault or tail.drains or file_size(tail.file) != tail.size_bytes:
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
                has_more = await self._ingest_batch(tail)
                tail.fault = ""
            except Exception as fault:  # must not stop the other runs; the sweep tries again
                self._warn(tail, fault)
                if not isinstance(fault, TrnError):  # drains wait for a registry that cannot be written
                    tail.fail_drains(fault)
            finally:
                tail.is_busy = False
            if has_more or (tail.is_rung and not tail.fault):
                self._queue(tail)

    def _warn(self, tail: FollowedRun, fault: Exception) -> None:
        if tail.fault != str(fault) or not tail.fault:
            tail.fault = str(fault) or repr(fault)
            is_bug = not isinstance(fault, TrnError | OSError)
            text = "events of run %s cannot be ingested: %s; will try again"
            logger.warning(text, tail.run_id, fault, exc_info=is_bug)

    async def _ingest_batch(self, tail: FollowedRun) -> bool:
        """Ingest one batch; returns whether there is more for this run."""
        if not tail.is_open:
            await self._open(tail)
        tail.num_reads += 1
        batch = await asyncio.to_thread(read_batch, tail.file, tail.offset)
        if batch.size_bytes != tail.size_bytes:
            if batch.size_bytes > tail.size_bytes >= 0:
                tail.grown_at = self._clock()
            tail.size_bytes = batch.size_bytes
        if batch.is_cut:
            await self._rewind(tail)
            return True
        failpoint("ingest.read")
        chunks = await self._parse(tail, batch)
        is_odd = chunks and (chunks[0].num_missing or chunks[0].damaged)
        if is_odd and await last_seq(tail, tail.event_end) != tail.read_seq:
            await self._rewind(tail)  # it was cut and has grown beyond the place since
            return True
        await self._log_damage(tail, batch, chunks)
        events = [event for chunk in chunks for event in chunk.events]
        if tail.is_rewinding:
            await self._end_rewind(tail, batch, chunks)
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
                await asyncio.sleep(0)  # let other tasks run
            chunk = parse(lines, batch.offset + start, seq, tail.nonce)
            seq = chunk.events[-1].seq if chunk.events else seq
            chunks.append(chunk)
        return chunks

    async def _log_damage(self, tail: FollowedRun, batch: Batch, chunks: list[Chunk]) -> None:
        """Log missing numbers, and set aside lines that are not events."""
        num_missing = sum(chunk.num_missing for chunk in chunks)
        if num_missing and not tail.is_rewinding:
            logger.warning(
                "run %s: %d events are missing after number %d", tail.run_id, num_missing, tail.read_seq
            )
        damaged = [*batch.damaged, *(damage for chunk in chunks for damage in chunk.damaged)]
        if not damaged:
            return
        try:
            await asyncio.to_thread(tail.damaged.add, damaged)
        except OSError as fault:
            logger.warning("run %s: damaged lines cannot be saved: %s", tail.run_id, fault)
        if not tail.num_damaged_logged:
            tail.num_damaged_logged = len(damaged)
            logger.warning(
                "run %s: %d damaged lines in its events file, copied to %s (the first is at byte %d: it %s)",
                tail.run_id,
                len(damaged),
                self._home.run(tail.run_id).damaged_events.name,
                damaged[0].offset,
                damaged[0].reason,
            )

    async def _commit(self, tail: FollowedRun, chunks: list[Chunk], events: list[Event]) -> None:
        """Commit to both stores what is new to each, and publish what the registry has committed."""
        last_seq = events[-1].seq
        end = next(chunk.ends[-1] for chunk in reversed(chunks) if chunk.events)
        points = [
            (event.seq, event.attempt, name, event.step or 0, value, event.timestamp_ms)
            for event in events
            for name, value in event.points()
        ]
        storing = followed = None
        server_events: list[tuple[int, ServerEvent]] = []
        if last_seq > tail.metrics_seq and not tail.is_store_behind:
            storing = self._metrics.add(tail.run_id, offset=end, last_seq=last_seq, points=points)
        if last_seq > tail.registry_seq:
            server_events = read_server_events(chunks, tail.registry_seq)
            followed = self._follow(tail, end, events, points, server_events)
        error: Exception | None = None
        if followed is not None:
            try:
                await committed(followed)
            except Exception as fault:  # the metric store may still have committed
                error = fault
            else:
                failpoint("ingest.committed")
                self._publish(tail, chunks)
                if server_events:
                    self.on_server_event(tail.run_id)
                if any(event.path is not None for event in events):
                    self._artifacts.look(tail.run_id)
                tail.registry_seq, tail.stored_seq = last_seq, max(last_seq, tail.stored_seq)
        if storing is not None:
            try:
                await committed(storing)
            except TrnError as fault:  # points are for charts: stored later, from the file
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
        self,
        tail: FollowedRun,
        offset: int,
        events: list[Event],
        points: list[Point],
        server_events: list[tuple[int, ServerEvent]],
    ) -> "Future[RunRecord]":
        known, start_step, end_step, heartbeat_ms = tail.registry_seq, None, None, 0
        named_files: list[NamedFile] = []
        for event in events:
            if event.seq > known:
                if event.path is not None:
                    named_files += event.named_files()
                tail.step = event.step_after(tail.step)
                if event.attempt == tail.number:
                    heartbeat_ms = max(heartbeat_ms, event.timestamp_ms)
                if event.start_step is not None:
                    start_step = event.start_step
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
            start_step=start_step,
            end_step=end_step,
            named_files=named_files,
            server_events=server_events,
        )

    def _publish(self, tail: FollowedRun, chunks: list[Chunk]) -> None:
        if not self._broadcaster.is_watched(tail.run_id):
            return
        for chunk in chunks:
            fresh = chunk.batch.after(tail.registry_seq) if chunk.events else None
            if fresh is not None:
                self._broadcaster.publish_events(tail.run_id, fresh)

    async def _open(self, tail: FollowedRun) -> None:
        """Find the place to read from: the earlier one of the two stores."""
        run = self._registry.get(tail.run_id)
        stored = self._metrics.place(tail.run_id)
        tail.step, tail.stored_seq, tail.metrics_seq = run.step, run.last_seq, stored.last_seq
        tail.offset = tail.event_end = run.event_offset
        tail.registry_seq = tail.read_seq = run.last_seq
        tail.nonce = run.nonce
        found_seq = await last_seq(tail, run.event_offset)
        is_between = await is_between_lines(tail, run.event_offset)
        if not is_between or found_seq > run.last_seq:
            await self._rewind(tail)
        else:
            # By the numbers of the file: lost numbers are used again.
            tail.registry_seq = tail.read_seq = found_seq
            if stored.offset < run.event_offset:
                await self._catch_up(tail, stored)
            elif not await is_valid(tail, stored):
                place = Place(run.event_offset, tail.registry_seq)
                await committed(self._metrics.rewind(tail.run_id, place))
                tail.metrics_seq = place.last_seq
        tail.is_open = True

    async def _catch_up(self, tail: FollowedRun, stored: Place) -> None:
        """The metric store is behind: read its missing events first."""
        is_there = await is_valid(tail, stored)
        tail.move_to(stored if is_there else await self._known_place(tail, stored.last_seq))

    async def _rewind(self, tail: FollowedRun) -> None:
        """The file has changed: read known events again, from a place that is still valid."""
        tail.move_to(await self._known_place(tail, min(tail.registry_seq, tail.metrics_seq)))
        tail.is_rewinding = True

    async def _known_place(self, tail: FollowedRun, seq: int) -> Place:
        while True:
            seq, offset = self._registry.event_place(tail.run_id, seq)
            place = Place(offset, seq)
            if offset == 0 or await is_valid(tail, place):
                return place
            seq -= 1

    async def _end_rewind(self, tail: FollowedRun, batch: Batch, chunks: list[Chunk]) -> None:
        """Search a batch for the last event that the registry has; following continues after it."""
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
                "run %s: its events file has lost events after number %d; %d was ingested",
                tail.run_id,
                known_seq,
                tail.registry_seq,
            )
        if known_seq < tail.metrics_seq:
            await committed(self._metrics.rewind(tail.run_id, place))
            tail.metrics_seq = known_seq
        # Last: after a crash before it, all this is done again.
        await committed(self._registry.rewind(tail.run_id, place.offset))
        tail.registry_seq, tail.is_rewinding = known_seq, False
