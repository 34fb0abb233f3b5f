"""Rows on their way: queries that wait for a model worker, the queue they wait in, and what each of them gets.

A query is answered exactly once, with an answer or a refusal, unless its client has left. One that is larger than a
batch, or that has to be computed in parts because its rows raise or end a worker, is answered by its parts.
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from gen_worker.inference.front.refusals import RETRY_AFTER_S, Refusal, RowFault
from gen_worker.inference.front.rows import Answer, Rows

Outcome = Answer | Refusal
Answered = Callable[[Outcome], None]


class Query:
    """Rows that are computed in one batch. `answered` is called at most once, in the loop's thread."""

    is_closed = False  # answered, or its client has left: it need not be computed
    is_part = False  # of a request that is larger than a batch
    min_shape = 1  # of the batch that computes it: parts of one request have the same shape
    num_deaths = 0  # workers that ended while they computed it alone
    parts: "Sequence[Query]" = ()
    queue: "Queue | None" = None  # that it waits in

    def __init__(self, rows: Rows, answered: Answered, *, deadline: float | None = None) -> None:
        self.rows = rows
        self.num_rows = rows.num_rows
        self._answered = answered
        self.deadline = deadline  # of time.monotonic()
        self.queued_at = time.monotonic()

    def answer(self, outcome: Outcome) -> None:
        if not self.is_closed:
            answered = self._answered
            self.leave()
            answered(outcome)

    def leave(self) -> None:
        """Its client has left."""
        self.is_closed = True
        self._answered = _ignore  # which has this query, too: a ring is freed late
        if self.queue is not None:
            self.queue.remove(self)
        for part in self.parts:
            part.leave()

    def is_due(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def divide(self, num_rows: int) -> "Sequence[Query]":
        """Parts of at most so many rows. When all of them are answered, the whole is."""
        bounds = [
            (start, min(start + num_rows, self.num_rows)) for start in range(0, self.num_rows, num_rows)
        ]
        outcomes: dict[int, Outcome] = {}

        def receiver(start: int) -> Answered:
            def receive(outcome: Outcome) -> None:
                outcomes[start] = outcome
                if len(outcomes) == len(bounds):
                    self.answer(_join([(*each, outcomes[each[0]]) for each in bounds]))

            return receive

        self.parts = [
            Query(self.rows.slice(start, stop), receiver(start), deadline=self.deadline)
            for start, stop in bounds
        ]
        for part in self.parts:
            part.is_part = self.is_part
            part.min_shape = self.min_shape
            part.queued_at = self.queued_at
        return self.parts


def _ignore(outcome: Outcome) -> None:
    """Its client has left."""


def _join(outcomes: Sequence[tuple[int, int, Outcome]]) -> Outcome:
    """(first row, end, outcome) of the parts, in order -> that of the whole. The first refusal stands for all.

    A refusal without faults is of every row of its part; with them, of the rows that they name.
    """
    first = next((outcome for _, _, outcome in outcomes if isinstance(outcome, Refusal)), None)
    if first is None:
        return _join_answers([outcome for _, _, outcome in outcomes if isinstance(outcome, Answer)])
    faults = [
        RowFault(
            row=start + (fault.row or 0), column=fault.column, found=fault.found, expected=fault.expected
        )
        for start, stop, outcome in outcomes
        if isinstance(outcome, Refusal) and outcome.kind == first.kind
        for fault in outcome.faults or ([RowFault(row=0)] if stop == start + 1 else [])
    ]
    return Refusal(
        first.kind,
        first.message,
        faults=faults,
        retry_after_s=first.retry_after_s,
        error_id=first.error_id,
    )


def _join_answers(answers: Sequence[Answer]) -> Answer:
    first = answers[0]
    return Answer(
        [piece for answer in answers for piece in answer.pieces],
        facts=first.facts,
        shape=max(answer.shape for answer in answers),
        compute_ms=sum(answer.compute_ms for answer in answers),
    )


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pool. What the job says of serving (`ServingSpec`)."""

    max_delay_ms: float = 0.0
    max_queue_rows: int = 4096
    max_batch_s: float = 60.0  # a worker that computes longer is ended

    def refuse(self, num_rows: int, waiting_rows: int) -> Refusal:
        """Of a request for which the queue has no room, and may never have."""
        limit = self.max_queue_rows
        if num_rows > limit:
            return Refusal("too_large", f"the request has {num_rows} rows, and at most {limit} can wait")
        return Refusal("queue_full", f"{waiting_rows} rows wait", retry_after_s=RETRY_AFTER_S)


DEFAULT_LIMITS = QueueLimits()


class Queue:
    """First in, first out; counted in rows."""

    def __init__(self) -> None:
        self._waiting: dict[Query, None] = {}
        self.num_rows = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, query: Query) -> None:
        query.queue = self
        self._waiting[query] = None
        self.num_rows += query.num_rows

    def push_front(self, queries: Sequence[Query]) -> None:
        """Before all others, in this order."""
        later, self._waiting = self._waiting, {}
        for query in queries:
            self.push(query)
        self._waiting |= later

    def remove(self, query: Query) -> None:
        del self._waiting[query]
        query.queue = None
        self.num_rows -= query.num_rows

    def oldest(self) -> Query:
        return next(iter(self._waiting))

    def take_all(self, *, with_parts: bool = True) -> list[Query]:
        """Without parts of larger requests, if so asked."""
        taken = [query for query in self._waiting if with_parts or not query.is_part]
        for query in taken:
            self.remove(query)
        return taken

    def take(self, max_rows: int) -> list[Query]:
        """The oldest ones, together at most so many rows, and at least one. It has none that is larger."""
        taken: list[Query] = []
        num_rows = 0
        for query in self._waiting:
            num_rows += query.num_rows
            if num_rows > max_rows and taken:
                break
            taken.append(query)
        for query in taken:
            self.remove(query)
        return taken
