"""The model workers of one version, and the queue before them.

There is no timer: a free worker takes what waits, up to a full batch. What a client sees of a worker that ends or of rows
that raise is decided here:

- A batch that raises is halved until the rows that raise are alone. The others are answered.
- A batch whose worker ended is computed again, each row alone, by the worker that takes its place. A row that ends that
  one, too, is quarantined: this pool answers it with `poison` from then on, at once.
- An answer with another number of rows than its request is an error of the whole batch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.figures import PoolCounters
from gen_worker.inference.front.queries import DEFAULT_LIMITS, Outcome, Query, Queue, QueueLimits
from gen_worker.inference.front.refusals import (
    Refusal,
    missed_deadline,
    poisoned,
    unavailable,
)
from gen_worker.inference.front.rows import Answer, Rows, rows_of_part
from gen_worker.inference.front.workers.batches import Batch, group_queries, read_blocks
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.front.workers.recovery import Recovery
from gen_worker.inference.front.workers.replica import Replica
from gen_worker.inference.front.workers.row_streams import RowStream, RowStreams
from gen_worker.inference.messages import (
    Answers,
    ColumnType,
    FromWorker,
    NotReady,
    Part,
    Raised,
    Ready,
    StreamEnd,
    StreamItem,
    Work,
)
from gen_worker.inference.model.orders import ModelOptions, WorkerEnd
from gen_worker.inference.shapes import shape_for

WATCH_S = 0.5


class NotReadyError(Exception):
    """A model worker could not start: the category of a worker's error, why, and the signal or `Cause` behind it."""

    def __init__(self, why: NotReady) -> None:
        super().__init__(why.words)
        self.category = why.category
        self.words = why.words
        self.cause = why.cause


class ReplicaPool:
    """Model workers of one version. All methods are of the loop's thread; `submit` does not block."""

    def __init__(
        self,
        version: ModelVersion,
        processes: ModelProcesses,
        options: ModelOptions,
        replicas: int = 1,
        *,
        limits: QueueLimits = DEFAULT_LIMITS,
        log: logging.Logger,
    ) -> None:
        self.version = version
        self.facts: VersionFacts = version.facts
        self.options = options
        self.limits = limits
        self.counters = PoolCounters()
        self._log = log
        self._replicas = [
            Replica(
                version,
                options.of_worker(number),
                processes,
                received=self._receive,
                changed=self._note_change,
                ended=self._note_end,
            )
            for number in range(replicas)
        ]
        self._queue = Queue()
        self._recovery = Recovery(self.counters, log)
        self._streams = RowStreams()
        self._last_number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_pump_due = False
        self._delayed: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._ready: Ready | None = None  # of the first worker: what the model takes and gives

    # Its life.

    async def open(self) -> None:
        """Start the workers. Returns when all of them are ready; NotReadyError, and nothing is left, if one is not."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            *(loop.create_task(replica.keep_up()) for replica in self._replicas),
            loop.create_task(self._watch()),
        ]
        try:
            while not all(replica.ready for replica in self._replicas):
                await self._changed.wait()
                self._changed.clear()
                for replica in self._replicas:
                    if replica.not_ready is not None:
                        raise NotReadyError(replica.not_ready)
        except BaseException:
            await self.close()
            raise

    async def drain(self) -> None:
        """Take no more, answer what is there, then end the workers."""
        self._is_draining = True
        while not self.is_idle:
            self._changed.clear()
            await self._changed.wait()
        await self.close()

    async def close(self) -> None:
        """End the workers at once. What still waits is refused. Safe to repeat."""
        self._is_draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        gone = unavailable("the model is not served any more")
        for query in self._take_all():
            query.answer(gone)
        for replica in self._replicas:
            self._streams.end_all(replica, gone)

    # What it is.

    @property
    def ready(self) -> Ready:
        """What the model takes and gives. After `open`."""
        assert self._ready is not None, "the pool is not open"
        return self._ready

    @property
    def inputs(self) -> tuple[ColumnType, ...]:
        return self.ready.inputs

    @property
    def outputs(self) -> tuple[ColumnType, ...]:
        return self.ready.outputs

    @property
    def can_stream(self) -> bool:
        return self.ready.can_stream

    @property
    def is_ready(self) -> bool:
        """Whether a worker can answer."""
        return self.num_ready > 0

    @property
    def num_ready(self) -> int:
        return sum(replica.ready is not None for replica in self._replicas)

    @property
    def worker_pids(self) -> list[int]:
        return [replica.ready.pid for replica in self._replicas if replica.ready is not None]

    @property
    def queued_rows(self) -> int:
        return self._queue.num_rows

    @property
    def is_idle(self) -> bool:
        """Nothing waits, and nothing is computed."""
        return (
            not self._queue
            and not self._recovery.again
            and not self._streams
            and not any(replica.batch or replica.suspects for replica in self._replicas)
        )

    # What is asked of it.

    def submit(self, query: Query) -> None:
        """Compute it, or refuse it at once: its callback may be called before this returns."""
        num_rows = query.num_rows
        if self._queue.num_rows + num_rows > self.limits.max_queue_rows:
            query.answer(self.limits.refuse(num_rows, self._queue.num_rows))
            return
        if self._is_draining:
            query.answer(unavailable("the model is not served any more"))
            return
        quarantine = self._recovery.quarantine
        if not quarantine.is_empty and (poison := quarantine.find(query.rows)):
            query.answer(poisoned(poison))
            return
        if num_rows > self.options.max_batch_rows:
            query.is_part = True
            query.min_shape = self.options.max_batch_rows
            for part in query.divide(self.options.max_batch_rows):
                self._queue.push(part)
        else:
            self._queue.push(query)
        self._pump_soon()

    async def predict(self, part: Part, payload: Sequence[Buffer]) -> Answer:
        """The answer to these rows, in the queue like any other. Refusal where there is none."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def receive(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        query = Query(rows_of_part(part, payload), receive)
        self.submit(query)
        try:
            outcome = await future
        finally:
            query.leave()
        if isinstance(outcome, Refusal):
            raise outcome
        return outcome

    def open_stream(
        self, rows: Rows, item: Callable[[bytes], None], end: Callable[[Refusal | None], None]
    ) -> RowStream:
        """Call `predict_stream` with one row. Refusal where that cannot be; else `end` is called, once and last."""
        if self._is_draining:
            raise unavailable("the model is not served any more")
        quarantine = self._recovery.quarantine
        if not quarantine.is_empty and (poison := quarantine.find(rows)):
            raise poisoned(poison)
        return self._streams.open(rows, item, end, self._replicas)

    def take_waiting(self) -> list[Query]:
        """What waits and was not given to a worker: another pool that takes the same columns may answer it. Not parts of
        a request: others of them are computed here, and one version answers all of its rows."""
        return self._queue.take_all(with_parts=False)

    def adopt(self, queries: Sequence[Query]) -> None:
        """Answer what waited for another pool, before all that comes."""
        self._queue.push_front(queries)
        self._pump()

    # Batches.

    def _pump_soon(self) -> None:
        """Give free workers what waits, after what can be read by now was read: it belongs into the same batch."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_when_read, 0)

    def _pump_when_read(self, rows_before: int) -> None:
        """Another turn of the loop for a batch that is not full, as long as the last one brought rows. None of them waits
        for a client: an empty turn ends it."""
        num_rows = self._queue.num_rows
        if rows_before < num_rows < self.options.max_batch_rows and self._has_free_replica():
            asyncio.get_running_loop().call_soon(self._pump_when_read, num_rows)
        else:
            self._pump()

    def _has_free_replica(self) -> bool:
        return any(replica.is_free for replica in self._replicas)

    def _pump(self) -> None:
        """Give free workers what waits."""
        self._is_pump_due = False
        for replica in self._replicas:
            if replica.is_free:
                if replica.suspects:
                    self._compute_suspect(replica)
                if replica.is_free and (self._recovery.again or self._queue):
                    self._compute_next(replica)
        self._wake_drain()

    def _compute_suspect(self, replica: Replica) -> None:
        while replica.suspects and replica.is_free:
            query = replica.suspects.popleft()
            if not query.is_closed:
                self._compute(replica, [query], is_alone=True)

    def _compute_next(self, replica: Replica) -> None:
        while self._recovery.again and replica.is_free:
            self._compute(replica, [query for query in self._recovery.again.popleft() if not query.is_closed])
        while self._queue and replica.is_free and not self._waits_for_more():
            now = time.monotonic()
            queries = []
            for query in self._queue.take(self.options.max_batch_rows):
                if query.deadline is not None and query.is_due(now):
                    query.answer(missed_deadline())
                else:
                    queries.append(query)
            self._compute(replica, queries)

    def _waits_for_more(self) -> bool:
        """Whether the batch is not full yet, and its oldest row may wait for others."""
        if not self.limits.max_delay_ms or self._queue.num_rows >= self.options.max_batch_rows:
            return False
        waited_s = time.monotonic() - self._queue.oldest().queued_at
        rest_s = self.limits.max_delay_ms / 1000 - waited_s
        if rest_s <= 0 or self._is_draining:
            return False
        if self._delayed is None:
            self._delayed = asyncio.get_running_loop().call_later(rest_s, self._end_delay)
        return True

    def _end_delay(self) -> None:
        self._delayed = None
        self._pump()

    def _compute(self, replica: Replica, queries: Sequence[Query], *, is_alone: bool = False) -> None:
        if not queries:
            return
        groups = group_queries(queries)
        if not self.inputs and len(groups) > 1:  # a model without a schema: one batch has the same columns
            self._recovery.again.extend(groups[1:])
            groups = groups[:1]
            queries = groups[0]
        num_rows = sum([query.num_rows for query in queries])
        min_shape = max([query.min_shape for query in queries])
        shape = max(shape_for(num_rows, self.options.max_batch_rows), min_shape)
        replica.batch = Batch(self._next_number(), groups, num_rows, shape, is_alone=is_alone)
        parts, payload = replica.batch.encode()
        replica.send(Work(batch=replica.batch.number, shape=shape, parts=parts), payload)

    # What workers say.

    def _receive(self, replica: Replica, message: FromWorker, payload: memoryview) -> None:
        batch = replica.batch
        if isinstance(message, Answers):
            if batch is None or batch.number != message.batch:
                self._blame(replica, f"it answers batch {message.batch}, which it does not have")
                return
            replica.batch = None
            if self._queue.num_rows >= self.options.max_batch_rows:
                self._pump()  # a full batch waits for no rows: it is computed while this one is answered
            self._answer(replica, batch, message, payload)
            if self._queue or replica.suspects or self._recovery.again:
                self._pump_soon()
            else:
                self._wake_drain()
        elif isinstance(message, Raised):
            if batch is None or batch.number != message.batch:
                self._blame(replica, f"it raised for batch {message.batch}, which it does not have")
                return
            replica.batch = None
            self._recovery.divide(batch, message)
            self._pump()
        elif isinstance(message, StreamItem | StreamEnd):
            self._streams.receive(message, payload)
            self._wake_drain()
        else:
            self._blame(replica, f"it says {type(message).__name__} after it was ready")

    def _blame(self, replica: Replica, words: str) -> None:
        self._log.error("a model worker of %s is ended: %s", self.facts.label, words)
        replica.kill()

    def _answer(self, replica: Replica, batch: Batch, message: Answers, payload: memoryview) -> None:
        try:
            blocks = read_blocks(batch, message, payload)
        except ValueError as fault:
            self._blame(replica, str(fault))
            refusal = Refusal("row_count", "the answer of the model does not fit the rows that were sent")
            for query in batch.queries:
                query.answer(refusal)
            return
        counters = self.counters
        counters.batches[batch.shape] = counters.batches.get(batch.shape, 0) + 1
        counters.rows += batch.num_rows
        counters.compute_s += message.compute_ms / 1000
        for group, block in zip(batch.groups, blocks, strict=True):
            start = 0
            for query in group:
                stop = start + query.num_rows
                if not query.is_closed:
                    answer = Answer(
                        ((block, start, stop),),
                        facts=self.facts,
                        shape=batch.shape,
                        compute_ms=message.compute_ms,
                    )
                    query.answer(answer)
                start = stop

    # Workers that begin and end.

    def _note_change(self, replica: Replica) -> None:
        if replica.ready is not None:
            if self._ready is None:
                self._ready = replica.ready
            self._pump()
        elif replica.not_ready is not None and self._ready is not None:
            self._log.error(
                "a model worker of %s is not ready: %s", self.facts.label, replica.not_ready.words
            )
            gone = unavailable("no model worker is ready")
            for query in [*replica.suspects] if self.is_ready else self._take_all():
                query.answer(gone)
        self._changed.set()

    def _note_end(self, replica: Replica, end: WorkerEnd | None) -> None:
        """Its worker ended. What it was computing is computed again, each row alone, by the next one."""
        self.counters.worker_ends += 1
        how = end.words if end else "its exit status is unknown"
        self._log.warning("a model worker of %s ended: %s", self.facts.label, how)
        self._streams.end_all(replica)
        batch, replica.batch = replica.batch, None
        if batch is not None:
            self._recovery.suspect(replica, batch, end)

    async def _watch(self) -> None:
        """End workers that compute one batch for too long."""
        while True:
            await asyncio.sleep(min(WATCH_S, self.limits.max_batch_s))
            latest = time.monotonic() - self.limits.max_batch_s
            for replica in self._replicas:
                if replica.batch is not None and replica.batch.sent_at < latest and not replica.is_killed:
                    self._blame(replica, f"it computes one batch for more than {self.limits.max_batch_s:g} s")

    # Smaller things.

    def _wake_drain(self) -> None:
        if self._is_draining and self.is_idle:
            self._changed.set()

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _take_all(self) -> list[Query]:
        """All that has no answer yet."""
        found = self._queue.take_all()
        while self._recovery.again:
            found += self._recovery.again.popleft()
        for replica in self._replicas:
            found += replica.suspects
            replica.suspects.clear()
            if replica.batch is not None:
                found += replica.batch.queries
                replica.batch = None
        return found
