"""Which version answers a request, and the way of its answer back: hooks, counters, headers, body."""

import asyncio
import logging
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.figures import Figures
from gen_worker.inference.front.http.exchange import JSON, Exchange
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.queries import Outcome, Query
from gen_worker.inference.front.refusals import Refusal, missed_deadline
from gen_worker.inference.front.rows import Answer, Rows
from gen_worker.inference.front.served import Served, answer_headers
from gen_worker.inference.front.shadow import Shadow

MAX_DEADLINE_MS = 86_400_000
Encode = Callable[[Answer], Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """What was asked and what was answered. `rows.encode()` and `answer.encode()` give parts and their bytes."""

    request_id: str
    rows: Rows
    answer: Answer
    facts: VersionFacts
    seconds: float  # from the request's last byte to its answer


class Answering:
    """The versions that answer. All of it is of the loop's thread."""

    def __init__(self, *, deadline_ms: int | None, log: logging.Logger) -> None:
        self.live: Served | None = None
        self.split: Served | None = None
        self.split_percent = 0.0
        self.shadow: Shadow | None = None
        self.figures = Figures()
        self.on_answered: Callable[[AnsweredRequest], None] | None = None
        self.is_draining = False
        self._deadline_ms = deadline_ms
        self._log = log

    @property
    def pools(self) -> list[tuple[str, ReplicaPool]]:
        """Those that compute, with their role."""
        found = [("live", self.live), ("split", self.split), ("shadow", self.shadow)]
        return [(role, each.pool) for role, each in found if each is not None]

    @property
    def is_ready(self) -> bool:
        return self.live is not None and self.live.pool.is_ready and not self.is_draining

    def choose(self, request_id: bytes) -> Served:
        """The version that answers this request: the same id gets the same one. Refusal where none does."""
        if self.split is not None and zlib.crc32(request_id) % 10_000 < 100 * self.split_percent:
            return self.split
        if self.live is None:
            raise Refusal("unavailable", "no model is served yet", retry_after_s=1)
        return self.live

    def predict(
        self, exchange: Exchange, served: Served, rows: Rows, encode: Encode, content_type: bytes = JSON
    ) -> None:
        """Answer the exchange with what the model says of these rows."""
        deadline_ms = self.read_deadline(exchange)
        prediction = _Prediction(self, exchange, rows, encode, content_type)
        query = Query(rows, prediction.receive)
        exchange.left = prediction.leave
        prediction.query = query
        if deadline_ms is not None:
            query.deadline = query.queued_at + deadline_ms / 1000
            prediction.timer = asyncio.get_running_loop().call_later(
                deadline_ms / 1000, query.answer, missed_deadline()
            )
        served.pool.submit(query)

    def note_fault(self, exchange: Exchange, doing: str) -> Refusal:
        """Of an exception that is ours: its traceback goes to the log, its id to the client."""
        self._log.exception("request %s: %s failed", exchange.request_id.decode("ascii"), doing)
        return Refusal("error", f"{doing} failed; the log has the details")

    def read_deadline(self, exchange: Exchange) -> int | None:
        """In milliseconds from now; None: the request may wait."""
        given = exchange.head.headers.get(b"x-deadline-ms")
        if given is None:
            return self._deadline_ms
        if not given.isdigit() or not 0 < (milliseconds := int(given[:20])) <= MAX_DEADLINE_MS:
            raise Refusal("input", f"X-Deadline-Ms is not a number from 1 to {MAX_DEADLINE_MS}")
        return milliseconds


class _Prediction:
    """One request that waits for its rows."""

    __slots__ = ("_answering", "_content_type", "_encode", "_exchange", "_rows", "query", "timer")

    def __init__(
        self,
        answering: Answering,
        exchange: Exchange,
        rows: Rows,
        encode: Encode,
        content_type: bytes,
    ) -> None:
        self._answering = answering
        self._exchange = exchange
        self._rows = rows
        self._encode = encode
        self._content_type = content_type
        self.query: Query | None = None
        self.timer: asyncio.TimerHandle | None = None

    def leave(self) -> None:
        """The client left."""
        self._answering.figures.left += 1
        if self.timer is not None:
            self.timer.cancel()
        if self.query is not None:
            self.query.leave()

    def receive(self, outcome: Outcome) -> None:
        """Called by the pool. Whatever fails here is a fault of this request alone."""
        if self.timer is not None:
            self.timer.cancel()
        exchange = self._exchange
        if isinstance(outcome, Refusal):
            exchange.refuse(outcome)
            return
        try:
            self._send(outcome)
        except Refusal as refusal:
            exchange.refuse(refusal)
        except Exception:
            exchange.refuse(self._answering.note_fault(exchange, "encoding the answer"))

    def _send(self, answer: Answer) -> None:
        answering, exchange = self._answering, self._exchange
        body = self._encode(answer)
        seconds = time.perf_counter() - exchange.begun_at
        if answering.on_answered is not None:
            answering.on_answered(
                AnsweredRequest(
                    request_id=exchange.request_id.decode("ascii"),
                    rows=self._rows,
                    answer=answer,
                    facts=answer.facts,
                    seconds=seconds,
                )
            )
        # Of the version that computed it: it may be a later one than was live when the request came.
        exchange.answer(200, body, answer_headers(answer.facts, answer.shape), self._content_type)
        answering.figures.note_prediction(self._rows.num_rows, seconds)
        if answering.shadow is not None:
            answering.shadow.compare(self._rows, answer)
