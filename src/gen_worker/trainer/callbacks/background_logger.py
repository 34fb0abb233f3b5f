"""Loggers that never block training: the hooks queue records, and one thread delivers them.

`BackgroundLogger` is the callback, `Delivery` the queue and the thread, `Sink` the interface of a back end.
"""

import importlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from gen_worker.contract.doubling_delay import DoublingDelay
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
FLUSH_EVERY_S = 0.5  # max delay of a record; the loop does not wake the thread
MAX_BATCH = 500
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_FAULT_CHARS = 300
STALL_S = 15.0  # a longer call is reported as an outage

# Fields of the job that may hold credentials (`env`, `uploads`), are data, or are already applied.
_LEFT_OUT = ("env", "mock_batches", "profiles", "uploads")

Kind = Literal["metrics", "validation", "checkpoint"]
Status = Literal["completed", "failed", "cancelled", "timeout"]
Log = Callable[[str, Literal["info", "warning"]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record: metrics of a step, a validation, or a checkpoint."""

    kind: Kind
    step: int
    time_ms: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the attempt ended."""

    status: Status
    step: int
    time_ms: int
    reason: str | None = None


class RefusedError(Exception):
    """The back end rejected the records; a retry would fail too."""


class Sink(Protocol):
    """A back end. Called only from the delivery thread; any exception but RefusedError means: retry later."""

    name: str  # for messages

    def open(self) -> None:
        """Connect and log the parameters. Called until it succeeds once."""

    def send(self, entries: Sequence[Entry]) -> int:
        """Deliver the first entries; returns how many, at least one."""

    def close(self, ending: Ending) -> None:
        """Log the ending and disconnect. Called until it succeeds once, after all entries were sent."""


class Delivery:
    """A bounded queue and the thread that empties it into a sink. `put` never waits for the back end.

    `log` is called once when the back end fails and once when it has recovered, from either thread.
    """

    def __init__(
        self,
        sink: Sink,
        log: Log,
        *,
        max_pending: int = MAX_PENDING,
        flush_every_s: float = FLUSH_EVERY_S,
        stall_s: float = STALL_S,
        first_backoff_s: float = FIRST_BACKOFF_S,
    ) -> None:
        self._sink = sink
        self._log = log
        self._max_pending = max_pending
        self._flush_every_s = flush_every_s
        self._stall_s = stall_s
        self._first_backoff_s = first_backoff_s
        self._lock = threading.Lock()
        self._pending: deque[Entry] = deque()
        self._taken: Sequence[Entry] = ()  # out of the queue, not yet delivered
        self._num_dropped = 0  # since the outage began
        self._is_away = False
        self._is_refused = False  # the last records that were sent
        self._is_abandoned = False
        self._call_began_s: float | None = None
        self._ending: Ending | None = None
        self._wake = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._deliver_forever, name=f"log-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue a record. A full queue drops its oldest record and counts it."""
        with self._lock:
            is_full = len(self._pending) >= self._max_pending
            if is_full:
                self._pending.popleft()
                self._num_dropped += 1
            self._pending.append(entry)
        began_s = self._call_began_s
        if is_full:
            self._note_away("it is too slow")
        elif began_s is not None and time.monotonic() - began_s > self._stall_s:
            self._note_away(f"no answer for {self._stall_s:g} s")

    def close(self, ending: Ending, *, within_s: float) -> None:
        """Deliver the queue and the ending. Waits at most `within_s` and logs what was not delivered."""
        self._ending = ending
        self._wake.set()
        if self._done.wait(within_s):
            return
        self.abandon()
        with self._lock:
            num_left = len(self._pending) + len(self._taken)
            num_dropped = self._num_dropped
        lost = [f"{num_left} records"] if num_left else []
        lost += [f"{num_dropped} records that were dropped before"] if num_dropped else []
        lost += ["the status of the run"]
        self._log(
            f"{self._sink.name} timed out after {within_s:g} s. Not delivered: {', '.join(lost)}", "warning"
        )

    def abandon(self) -> None:
        """Drop everything: the thread logs nothing more and ends after its current call."""
        with self._lock:
            self._is_abandoned = True
        self._wake.set()

    def _deliver_forever(self) -> None:
        is_open = False
        backoff = DoublingDelay(self._first_backoff_s, MAX_BACKOFF_S)
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
            except Exception as fault:  # client libraries raise anything
                self._note_away(_in_words(fault))
                logger.debug("%s", self._sink.name, exc_info=True)
                pause_s = backoff.next_s()
            else:
                self._note_back()
                pause_s = self._flush_every_s
                backoff.reset()
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
                self._note_away(f"it rejected {num_taken} records: {fault}")
            with self._lock:
                self._taken = self._taken[num_taken:]
            self._call_began_s = time.monotonic()

    def _end(self, ending: Ending) -> None:
        try:
            self._sink.close(ending)
        except RefusedError as fault:
            self._is_refused = True
            self._note_away(f"it rejected the status of the run: {fault}")
        self._note_back()
        if self._num_dropped:
            self._log_unless_abandoned(
                f"{self._sink.name}: {self._num_dropped} records were not delivered", "warning"
            )
        self._done.set()

    def _note_away(self, why: str) -> None:
        with self._lock:
            if self._is_away:
                return
            self._is_away = True
        self._log_unless_abandoned(
            f"{self._sink.name} cannot be written: {why[:MAX_FAULT_CHARS]}. Training continues. Up to"
            f" {self._max_pending} records are kept for retry, then the oldest are dropped",
            "warning",
        )

    def _note_back(self) -> None:
        with self._lock:
            if not self._is_away or self._is_refused:
                return
            self._is_away = False
            num_dropped, self._num_dropped = self._num_dropped, 0
        lost = f"{num_dropped} records were dropped" if num_dropped else "nothing was lost"
        level: Literal["info", "warning"] = "warning" if num_dropped else "info"
        self._log_unless_abandoned(f"{self._sink.name} can be written again: {lost}", level)

    def _log_unless_abandoned(self, message: str, level: Literal["info", "warning"]) -> None:
        if not self._is_abandoned:
            self._log(message, level)


@dataclass(eq=False, kw_only=True)
class BackgroundLogger(Callback, ABC):
    """Base of the loggers. Only the main process logs.

    While a back end is away, `max_pending` records are kept. The end of a run waits up to `close_s` for them.
    """

    max_pending: int = MAX_PENDING
    close_s: float = CLOSE_S
    _delivery: Delivery | None = field(default=None, init=False, repr=False)

    @abstractmethod
    def make_sink(self, run: RunHandle) -> Sink:
        """The back end. StartupError if it can never work; must not wait for a network."""

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
        status: Status = "failed"
        if isinstance(error, TrainingCanceled | KeyboardInterrupt):
            status = "cancelled"
        elif isinstance(error, TrainingTimeout):
            status = "timeout"
        self._close(run, status, _in_words(error))

    def _put(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        if self._delivery is not None:
            self._delivery.put(Entry(kind=kind, step=step, time_ms=now_ms(), values=values))

    def _close(self, run: RunHandle, status: Status, reason: str | None) -> None:
        delivery, self._delivery = self._delivery, None
        if delivery is not None:
            ending = Ending(status=status, step=run.state.step, time_ms=now_ms(), reason=reason)
            delivery.close(ending, within_s=self.close_s)


def import_extra(name: str, extra: str) -> Any:
    """A module of an optional package; StartupError says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise StartupError(f"{extra} cannot be imported ({fault}): pip install 'trn[{extra}]'") from fault


def job_parameters(job: TrainingJobSpec) -> dict[str, Any]:
    """The job as flat names and plain values (`hyperparams.lr`), without unset, secret and data fields."""
    flat: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(job, enc_hook=repr).items():
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
