"""A worker as a process, in any mode: secrets masked in its log, and an error as one message and an exit code."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.redaction import SecretRedactor, looks_secret
from gen_worker.errors import (
    EXIT_CODE_BY_CATEGORY,
    Category,
    Cause,
    ExitCode,
    TrainingCanceled,
    TrainingTimeout,
    WorkerError,
    mark_report,
)
from gen_worker.frozen_imports import name_originals
from gen_worker.trainer.attempt.failure import describe_failure, find_cause, is_our_fault
from gen_worker.trainer.attempt.runtime_env import (
    RankEnvironment,
    WorkerEnvironment,
    take_capability_token,
)
from gen_worker.trainer.processes.outcome import leave_outcome

logger = logging.getLogger("gen_worker.runtime")


class WorkerRuntime:
    """One attempt of one run, in this process or below it. Each mode has its own `run`. `category` is set when it failed."""

    def __init__(self, environ: Mapping[str, str], early_signals: Sequence[int] = ()) -> None:
        self._environ = environ
        self._early_signals = early_signals
        self._redactor = SecretRedactor()
        self.process: RankEnvironment | None = None
        self.category: Category | None = None
        self.is_agreed_stop = False
        self.is_reported = False  # the failure has a terminal event

    def run(self) -> int:
        """0 when the run is completed. Else the root cause is raised, after its terminal event."""
        raise NotImplementedError

    def redact(self, text: str) -> str:
        return self._redactor.redact(text)

    def take_token(self, environment: WorkerEnvironment) -> str | None:
        """The capability token. From now on it and the secret variables are masked."""
        token = take_capability_token(self._environ)
        self._redactor.add(token)
        self._redactor.add_variables(self._environ, environment.secret_names)
        return token

    def mask_secrets_of(self, job: TrainingJobSpec) -> None:
        self._redactor.add_variables(job.env, filter(looks_secret, job.env))

    def note_failure(
        self, cause: BaseException, *, phase: Category, has_agreed_to_stop: bool, is_reported: bool
    ) -> None:
        self.category, _ = describe_failure(cause, phase=phase)
        is_stop = issubclass(type(cause), TrainingCanceled | TrainingTimeout)
        self.is_agreed_stop = is_stop and has_agreed_to_stop
        self.is_reported = is_reported

    @contextlib.contextmanager
    def redacted_logs(self) -> Iterator[None]:
        """While entered, secrets are masked in this process's log."""
        # On the handlers: a logger's filter does not see records of its children.
        handlers = list(logging.getLogger().handlers)
        for handler in handlers:
            handler.addFilter(self._redactor)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(self._redactor)


class _LogFormatter(logging.Formatter):
    """Tracebacks also name the original of a frozen file."""

    def format(self, record: logging.LogRecord) -> str:
        return name_originals(super().format(record))


def set_log_levels() -> None:
    """Of a worker. Setting a level visits every logger, so it is set only where it differs."""
    for name, level in ((None, logging.INFO), ("httpx", logging.WARNING)):  # httpx logs every request
        if logging.getLogger(name).level != level:
            logging.getLogger(name).setLevel(level)


def run_as_process(runtime: WorkerRuntime) -> ExitCode:
    """An error becomes one message and an exit code; its traceback is in the log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    set_log_levels()
    with runtime.redacted_logs():
        try:
            runtime.run()
        except BaseException as cause:
            return _report(runtime, cause)
    leave_outcome(runtime.process, None)
    return ExitCode.COMPLETED


def _report(runtime: WorkerRuntime, cause: BaseException) -> ExitCode:
    if issubclass(type(cause), WorkerError):
        logger.debug("the attempt failed", exc_info=cause)
    else:
        logger.error("the attempt failed", exc_info=cause)
    category = runtime.category or Category.STARTUP
    _, text = describe_failure(cause, phase=category)
    if runtime.process is not None and runtime.process.outcome_dir is not None:
        # The parent reports it, once for all processes. A stop that all agreed on is no failure.
        is_agreed = runtime.is_agreed_stop
        leave_outcome(
            runtime.process, category, runtime.redact(text), cause=find_cause(cause), is_agreed=is_agreed
        )
        return ExitCode.COMPLETED if is_agreed else EXIT_CODE_BY_CATEGORY[category]
    if is_our_fault(cause):
        _say(runtime.redact(text))
        return ExitCode.BUG
    _say(f"{category}: {runtime.redact(text)}")
    if find_cause(cause) == Cause.DISK_FULL and not runtime.is_reported:
        return ExitCode.DISK_FULL  # no event says so
    return EXIT_CODE_BY_CATEGORY[category]


def _say(text: str) -> None:
    """For people. Where the log is on a full disk, the exit code alone says what happened."""
    with contextlib.suppress(OSError):
        print(mark_report(text), file=sys.stderr)  # noqa: T201
