"""Loggers that never hold up training: the hooks queue, one thread delivers, and what is lost is told.

`BackgroundLogger` is the callback, `Delivery` the queue and the thread, `Sink` what a back end has to do.
"""

import importlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.redaction import strip_url_secrets
from gen_worker.errors import StartupError, TrainingCanceled, TrainingTimeout
from gen_worker.trainer.attempt.state import MetricsRecord
from gen_worker.trainer.callbacks.base import Callback, RunHandle

if TYPE_CHECKING:
    from gen_worker.trainer.artifacts import SavedCheckpoint

logger = logging.getLogger("gen_worker.loggers")

MAX_PENDING = 10_000
CLOSE_S = 5.0
FLUSH_EVERY_S = 0.5  # how stale the back end may be; the loop pays nothing for waking the thread
MAX_BATCH = 500
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_FAULT_CHARS = 300
STALL_S = 15.0  # a call that takes longer is told as an outage

# Of the job: may hold credentials (`env`, `uploads`), or is data, or is already applied.
_LEFT_OUT = ("env", "mock_batches", "profiles", "uploads")

Say = Callable[[str, Literal["info", "warning"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing to log: metrics of a step, a validation, or a checkpoint."""

    kind: Literal["metrics", "validation", "checkpoint"]
    step: int
    time_ms: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the attempt ended."""

    status: Literal["completed", "failed", "cancelled", "timeout"]
    step: int
    time_ms: int
    reason: str | None = None


class RefusedError(Exception):
    """The back end is there and will never take this: sending it again is of no use."""


class Sink(Protocol):
    """A back end. All methods are called by the delivery's thread; what they raise means: try again later."""

    name: str  # for messages

    def open(self) -> None:
        """Connect and log the parameters. Called until it succeeds once."""

    def send(self, entries: Sequence[Entry]) -> int:
        """Deliver the first entries; returns how many, at least one."""

    def close(self, ending: Ending) -> None:
        """Log how it ended and let go. Called until it succeeds once, after everything was sent."""


class Delivery:
    """A bounded queue and the thread that empties it into a sink. `put` never waits for the back end.

    `say` is called once when the back end goes away and once when everything has arrived again, from either thread.
    """

    def __init__(
        self,
        sink: Sink,
        say: Say,
        *,
        max_pending: int = MAX_PENDING,
        flush_every_s: float = FLUSH_EVERY_S,
        stall_s: float = STALL_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._sink = sink
        self._say = say
        self._max_pending = max_pending
        self._flush_every_s = flush_every_s
        self._stall_s = stall_s
        self._first_backoff_s = first_backoff_s
        self._lock = threading.Lock()
        self._pending: deque[Entry] = deque()
        self._taken: Sequence[Entry] = ()  # of the thread: out of the queue, not yet delivered
        self._num_dropped = 0  # since it went away
        self._is_away = False
        self._is_refused = False  # what was sent last
        self._is_abandoned = False
        self._call_began_s: float | None = None
        self._ending: Ending | None = None
        self._wake = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._deliver_forever, name=f"log-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue; where the queue is full the oldest entry makes room and is counted."""
        with self._lock:
            is_full = len(self._pending) >= self._max_pending
            if is_full:
                self._pending.popleft()
                self._num_dropped += 1
            self._pending.append(entry)
        if self._is_away:
            return
        began_s = self._call_began_s
        if is_full:
            self._note_away("it does not keep up")
        elif began_s is not None and time.monotonic() - began_s > self._stall_s:
            self._note_away(f"it has not answered for {self._stall_s:g} s")

    def close(self, ending: Ending, *, within_s: float) -> None:
        """Deliver what is queued and how it ended; waits `within_s` at most and says what did not arrive."""
        self._ending = ending
        self._wake.set()
        if self._done.wait(within_s):
            return
        self.abandon()
        with self._lock:
            num_left = len(self._pending) + len(self._taken)
            num_dropped = self._num_dropped
        lost = [f"{num_left} records"] if num_left else []
        lost += [f"{num_dropped} that were dropped before"] if num_dropped else []
        lost += ["how the run ended"]
        self._say(
            f"{self._sink.name} did not take everything within {within_s:g} s of the end: {', '.join(lost)} did not"
            " arrive there",
            "warning",
        )

    def abandon(self) -> None:
        """Let go of everything at once: the thread says nothing more and ends with the call it is in."""
        with self._lock:
            self._is_abandoned = True
        self._wake.set()

    def _deliver_forever(self) -> None:
        is_open = False
        backoff_s = self._first_backoff_s
        while not self._is_abandoned:
            ending = self._ending  # before the queue is read: nothing is queued after it
            self._call_began_s = time.monotonic()
            try:
                if not is_open:
                    self._sink.open()
                    is_open = True
                self._send_pending()
                if ending is not None:
                    self._end(ending)
                    return
            except Exception as fault:  # whatever a client library raises
                self._note_away(_in_words(fault)[:MAX_FAULT_CHARS])
                logger.debug("%s", self._sink.name, exc_info=True)
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                self._note_back()
                pause_s, backoff_s = self._flush_every_s, self._first_backoff_s
            self._call_began_s = None
            self._wake.wait(min(pause_s, self._first_backoff_s) if self._ending else pause_s)
            self._wake.clear()

    def _send_pending(self) -> None:
        while not self._is_abandoned:
            with self._lock:
                if not self._taken:
                    num = min(len(self._pending), MAX_BATCH)
                    self._taken = [self._pending.popleft() for _ in range(num)]
            if not self._taken:
                return
            try:
                num_taken = self._sink.send(self._taken)
                self._is_refused = False
            except RefusedError as fault:
                num_taken = len(self._taken)
                self._is_refused = True
                with self._lock:
                    self._num_dropped += num_taken
                self._note_away(f"it refused {num_taken} records: {fault}"[:MAX_FAULT_CHARS])
            with self._lock:
                self._taken = self._taken[num_taken:]
            self._call_began_s = time.monotonic()

    def _end(self, ending: Ending) -> None:
        try:
            self._sink.close(ending)
        except RefusedError as fault:
            self._is_refused = True
            self._note_away(f"it refused how the run ended: {fault}"[:MAX_FAULT_CHARS])
        self._note_back()
        if self._num_dropped:
            self._tell(f"{self._num_dropped} records did not arrive at {self._sink.name}", "warning")
        self._done.set()

    def _note_away(self, why: str) -> None:
        with self._lock:
            if self._is_away:
                return
            self._is_away = True
        self._tell(
            f"{self._sink.name} cannot be written: {why}. Training goes on; up to {self._max_pending} records wait for it,"
            " then the oldest are dropped",
            "warning",
        )

    def _note_back(self) -> None:
        with self._lock:
            if not self._is_away or self._is_refused:
                return
            self._is_away = False
            num_dropped, self._num_dropped = self._num_dropped, 0
        lost = f"{num_dropped} records were dropped meanwhile" if num_dropped else "nothing was lost"
        self._tell(f"{self._sink.name} can be written again: {lost}", "warning" if num_dropped else "info")

    def _tell(self, message: str, level: Literal["info", "warning"]) -> None:
        if not self._is_abandoned:
            self._say(message, level)


class BackgroundLogger(Callback, ABC):
    """Base of the loggers: what happens in the hooks, for any back end. Only the main process logs."""

    def __init__(self, *, max_pending: int = MAX_PENDING, close_s: float = CLOSE_S) -> None:
        """`max_pending` records wait for a back end that is away; the end of a run waits `close_s` for them."""
        self.max_pending = max_pending
        self.close_s = close_s
        self._delivery: Delivery | None = None

    @abstractmethod
    def make_sink(self, run: RunHandle) -> Sink:
        """The back end. Raises StartupError where it can never work; must not wait for a network."""

    def on_train_begin(self, run: RunHandle) -> None:
        if run.is_main:
            self._delivery = Delivery(self.make_sink(run), run.log, max_pending=self.max_pending)

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        self._put("metrics", run.state.step, dict(values))

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:  # noqa: ARG002
        values = {"rows": record.rows, "duration_s": record.duration_s, "metrics": dict(record.metrics)}
        self._put("validation", record.step, values)

    def on_checkpoint(self, run: RunHandle, checkpoint: "SavedCheckpoint") -> None:  # noqa: ARG002
        values = {
            "path": str(checkpoint.path),
            "final": checkpoint.final,
            "verified": checkpoint.verified,
            "size_bytes": checkpoint.size_bytes,
        }
        self._put("checkpoint", checkpoint.step, values)

    def on_train_end(self, run: RunHandle) -> None:
        self._close(run, "completed", run.state.stop_reason)

    def on_exception(self, run: RunHandle, error: BaseException) -> None:
        is_cancelled = isinstance(error, TrainingCanceled | KeyboardInterrupt)
        status: Literal["cancelled", "timeout", "failed"] = (
            "cancelled" if is_cancelled else "timeout" if isinstance(error, TrainingTimeout) else "failed"
        )
        self._close(run, status, _in_words(error))

    def _put(
        self, kind: Literal["metrics", "validation", "checkpoint"], step: int, values: Mapping[str, Any]
    ) -> None:
        if self._delivery is not None:
            self._delivery.put(Entry(kind=kind, step=step, time_ms=now_ms(), values=values))

    def _close(
        self,
        run: RunHandle,
        status: Literal["completed", "failed", "cancelled", "timeout"],
        reason: str | None,
    ) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            ending = Ending(status=status, step=run.state.step, time_ms=now_ms(), reason=reason)
            delivery.close(ending, within_s=self.close_s)


def import_extra(name: str, extra: str) -> Any:
    """A module of an optional package; StartupError says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise StartupError(
            f"{extra} is asked for and cannot be imported ({fault}): pip install 'trn[{extra}]'"
        ) from fault


def job_parameters(job: TrainingJobSpec) -> dict[str, Any]:
    """The job as flat names and plain values (`hyperparams.lr`), without what is unset, secret or data."""
    document = msgspec.to_builtins(job, enc_hook=repr)
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if name not in _LEFT_OUT:
            _flatten(name, value, flat)
    return flat


def _flatten(name: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}", item, flat)
    elif isinstance(value, str):
        flat[name] = strip_url_secrets(value)
    elif isinstance(value, list):
        if value:
            flat[name] = strip_url_secrets(msgspec.json.encode(value).decode())
    elif value is not None:
        flat[name] = value


def _in_words(error: BaseException) -> str:
    return strip_url_secrets(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
