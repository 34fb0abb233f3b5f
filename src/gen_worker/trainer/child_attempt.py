"""An attempt that other processes make for this one: how it ended, and the terminal event they could not write."""

import contextlib
import os
from collections.abc import Callable, Iterator

from gen_worker.errors import Category, WorkerError
from gen_worker.trainer.contracts import TrainingJobSpec
from gen_worker.trainer.event_log import EventLog
from gen_worker.trainer.failure import describe_failure
from gen_worker.trainer.lease import RunLease
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.runtime_env import WorkerEnvironment

Redact = Callable[[str], str]


class ChildAttemptError(WorkerError):
    """The attempt ended with a category of its own."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


def report_missing_end(
    environment: WorkerEnvironment,
    job: TrainingJobSpec,
    cause: WorkerError,
    redact: Redact,
    *,
    is_continued: bool,
) -> None:
    """Write the terminal event that is missing: of the children's attempt, or of one that never got to one."""
    with _reporter(environment, job, redact, is_continued=is_continued) as (reporter, log):
        if is_continued and log.last_event in (None, "completed", "failed"):
            return  # it told the end itself, or never began
        if not is_continued:
            reporter.started(trainer=environment.plugin or job.trainer, pid=os.getpid())
        category, error = describe_failure(cause)
        reporter.failed(log.last_step if is_continued else 0, category, error)


@contextlib.contextmanager
def _reporter(
    environment: WorkerEnvironment, job: TrainingJobSpec, redact: Redact, *, is_continued: bool
) -> Iterator[tuple[TrainingReporter, EventLog]]:
    lease = RunLease.acquire(environment.checkpoints_dir, run_id=job.run_id)  # waits for the child's writer
    try:
        log = EventLog(environment.events_path, run_id=job.run_id, is_continued=is_continued)
        reporter = TrainingReporter(environment.events_path, run_id=job.run_id, log=log, redact=redact)
        try:
            yield reporter, log
        finally:
            reporter.close()
    finally:
        lease.release()
