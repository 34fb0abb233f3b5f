"""An attempt in processes that this one started: the signals passed on to them, and the terminal event they missed."""

import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import RunLease
from gen_worker.errors import Category, TrainingCanceled, WorkerError
from gen_worker.trainer.attempt.failure import describe_failure, find_cause
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.events.event_log import EventLog
from gen_worker.trainer.reporting import TrainingReporter

Redact = Callable[[str], str]


class ChildAttemptError(WorkerError):
    """The attempt ended with a category of its own."""

    def __init__(self, category: Category, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.category = category
        self.cause = cause


class SignalRelay:
    """Passes SIGTERM and SIGINT on by `send`, which returns False while there is no process to send to."""

    def __init__(self, early_signals: Sequence[int] = ()) -> None:
        self.send: Callable[[int], bool] = lambda _number: False
        self._early = early_signals  # received before there was a relay; the list may still grow
        self._pending: deque[int] = deque()
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._pending.extendleft(reversed(self._early))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)
        self.pass_on()

    def pass_on(self) -> None:
        """Send what is pending. A signal may interrupt this and do the same."""
        with contextlib.suppress(IndexError):
            while True:
                number = self._pending.popleft()
                if not self.send(number):
                    self._pending.appendleft(number)
                    return

    def raise_if_cancelled(self) -> None:
        if self._pending:
            raise TrainingCanceled(f"cancelled by {signal.Signals(self._pending[0]).name}")


def report_missing_end(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    cause: WorkerError,
    redact: Redact,
    *,
    is_continued: bool,
) -> None:
    """Write the terminal event that is missing: of the children's attempt (`is_continued`), or of a new one."""
    category, error = describe_failure(cause)
    close_attempt(
        run_id=job.run_id,
        attempt=environment.attempt,
        checkpoints_dir=environment.checkpoints_dir,
        events_path=environment.events_path,
        trainer=environment.plugin or job.trainer,
        nonce=environment.nonce,
        category=category,
        error=error,
        cause=find_cause(cause),
        doorbell=environment.doorbell,
        closed_by=None,
        redact=redact,
        is_continued=is_continued,
    )


def close_attempt(
    *,
    run_id: str,
    attempt: int | None,
    checkpoints_dir: Path,
    events_path: Path,
    trainer: str | None = None,
    nonce: str = "",
    category: Category,
    error: str,
    cause: str = "",
    fault: str = "",
    values: Mapping[str, Any] | None = None,
    doorbell: str | None = None,
    closed_by: str | None = "daemon",
    redact: Redact = str,
    is_continued: bool = True,
) -> None:
    """Write the terminal event of a worker that has exited, unless it did. Safe to repeat.

    An attempt without any event gets `started` too. LeaseHeldError where a process still holds the run's folder. Reads
    no file but the events: after a power cut the job and the contract may be empty.
    """
    lease = RunLease.acquire(checkpoints_dir, run_id=run_id, nonce=nonce)  # waits for the child's writer
    with contextlib.ExitStack() as stack:
        stack.callback(lease.release)
        log = EventLog(
            events_path,
            run_id=run_id,
            is_continued=is_continued,
            attempt=attempt,
            nonce=nonce,
            doorbell=doorbell,
        )
        reporter = TrainingReporter(events_path, run_id=run_id, log=log, redact=redact)
        stack.callback(reporter.close)
        if log.last_event in ("completed", "failed"):
            return
        if log.last_event is None:
            if is_continued and attempt is None:
                return  # it never started, and its number is unknown
            reporter.started(trainer=trainer, pid=os.getpid())
        reporter.failed(
            step=log.last_step,
            error=error,
            category=category,
            cause=cause,
            fault=fault,
            values=values,
            **({"closed_by": closed_by} if closed_by else {}),
        )
