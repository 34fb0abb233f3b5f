"""An attempt that other processes make for this one: how it ended, and the terminal event they could not write."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import RunLease
from gen_worker.errors import Category, WorkerError
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


def report_missing_end(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    cause: WorkerError,
    redact: Redact,
    *,
    is_continued: bool,
) -> None:
    """Write the terminal event that is missing: of the children's attempt, or of one that never got to one."""
    category, error = describe_failure(cause)
    _write_end(
        job.run_id,
        checkpoints_dir=environment.checkpoints_dir,
        events_path=environment.events_path,
        trainer=environment.plugin or job.trainer,
        attempt=environment.attempt,
        nonce=environment.nonce,
        doorbell=environment.doorbell,
        category=category,
        error=error,
        fields={"cause": named} if (named := find_cause(cause)) else {},
        redact=redact,
        is_continued=is_continued,
    )


def close_attempt(
    *,
    run_id: str,
    attempt: int,
    checkpoints_dir: Path,
    events_path: Path,
    trainer: str | None = None,
    nonce: str = "",
    category: Category,
    error: str,
    cause: str = "",
    doorbell: str | None = None,
) -> None:
    """For whoever started a worker that is gone: write its terminal event, unless there is one. Safe to repeat.

    An attempt that wrote nothing at all gets its `started` too. LeaseHeldError where somebody still works there.
    Reads no file but the events: after a power cut the job and the contract may be empty.
    """
    _write_end(
        run_id,
        checkpoints_dir=checkpoints_dir,
        events_path=events_path,
        trainer=trainer,
        attempt=attempt,
        nonce=nonce,
        doorbell=doorbell,
        category=category,
        error=error,
        fields={"cause": cause, "closed_by": "daemon"} if cause else {},
        redact=str,
        is_continued=True,
    )


def _write_end(
    run_id: str,
    *,
    checkpoints_dir: Path,
    events_path: Path,
    trainer: str | None,
    attempt: int | None,
    nonce: str,
    doorbell: str | None,
    category: Category,
    error: str,
    fields: Mapping[str, str],
    redact: Redact,
    is_continued: bool,
) -> None:
    lease = RunLease.acquire(checkpoints_dir, run_id=run_id, nonce=nonce)  # waits for the child's writer
    try:
        log = EventLog(
            events_path,
            run_id=run_id,
            is_continued=is_continued,
            attempt=attempt,
            nonce=nonce,
            doorbell=doorbell,
        )
        reporter = TrainingReporter(events_path, run_id=run_id, log=log, redact=redact)
        try:
            if log.last_event in ("completed", "failed"):
                return  # it told the end itself
            if log.last_event is None:
                if is_continued and attempt is None:
                    return  # it never began, and there is no number to tell that with
                reporter.started(trainer=trainer, pid=os.getpid())
            reporter.failed(step=log.last_step, error=error, category=category, **fields)
        finally:
            reporter.close()
    finally:
        lease.release()
