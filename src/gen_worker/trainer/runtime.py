"""A training worker: environment or contract file -> job -> `Trainer` -> exit code.

A run of several processes goes to torchrun (`processes.torchrun`), which starts this runtime in each of them.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from gen_worker.contract import failpoints
from gen_worker.contract.job.rules import read_job_spec
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.redaction import SecretRedactor, looks_secret
from gen_worker.errors import (
    EXIT_CODE_BY_CATEGORY,
    Category,
    Cause,
    ExitCode,
    SpecError,
    TrainingCanceled,
    TrainingTimeout,
    WorkerError,
    mark_report,
)
from gen_worker.frozen_imports import name_originals
from gen_worker.trainer.attempt.failure import describe_failure, find_cause, is_our_fault
from gen_worker.trainer.attempt.isolation import run_isolated
from gen_worker.trainer.attempt.runtime_env import (
    RankEnvironment,
    WorkerEnvironment,
    read_environment,
    take_capability_token,
)
from gen_worker.trainer.compute.heap import keep_freed_memory
from gen_worker.trainer.processes.outcome import leave_outcome, report_start
from gen_worker.trainer.processes.torchrun import run_processes
from gen_worker.trainer.trainer import Trainer

logger = logging.getLogger("gen_worker.runtime")

ECHO_EVERY_S = 2.0


class TrainingRuntime:
    """One attempt of one run, in this process or below it. `category` is set when it failed."""

    def __init__(self, environ: Mapping[str, str] = os.environ, early_signals: Sequence[int] = ()) -> None:
        self._environ = environ
        self._early_signals = early_signals
        self._echo_every_s = ECHO_EVERY_S if sys.stderr.isatty() else None
        self._redactor = SecretRedactor()
        self.process: RankEnvironment | None = None
        self.category: Category | None = None
        self.is_agreed_stop = False
        self.is_reported = False  # the failure has a terminal event

    def redact(self, text: str) -> str:
        return self._redactor.redact(text)

    def run(self) -> int:
        """Train; 0 when the run is completed. Else the root cause is raised, after its terminal event."""
        failpoints.arm_from_env()
        trainer: Trainer | None = None
        try:
            environment = read_environment(self._environ)
            self.process = environment.process
            report_start(self.process)
            if self.process is not None and self.process.rank > 0:
                logging.getLogger("gen_worker").setLevel(logging.WARNING)  # the main process logs for all
            token = take_capability_token(self._environ)
            self._redactor.add(token)
            self._redactor.add_variables(self._environ, environment.secret_names)
            job = read_job_spec(environment.job_spec_path)
            self._redactor.add_variables(job.env, filter(looks_secret, job.env))
            _check_processes(job, environment)
            if job.resources.processes > 1 and environment.process is None:
                return run_processes(
                    environment, job, token=token, redact=self.redact, early_signals=self._early_signals
                )
            if environment.is_isolated:
                return run_isolated(
                    environment, job, token=token, redact=self.redact, early_signals=self._early_signals
                )
            if not environment.returns_freed_memory:
                keep_freed_memory(self._environ)
            trainer = Trainer.for_worker(
                environment,
                job,
                token=token,
                redact=self.redact,
                early_signals=self._early_signals,
                echo_every_s=self._echo_every_s,
            )
            trainer.train()
        except BaseException as cause:
            attempt = None if trainer is None else trainer.attempt
            phase = Category.STARTUP if attempt is None else attempt.phase
            self.category, _ = describe_failure(cause, phase=phase)
            is_stop = issubclass(type(cause), TrainingCanceled | TrainingTimeout)
            self.is_agreed_stop = is_stop and attempt is not None and attempt.has_agreed_to_stop
            self.is_reported = attempt is not None and attempt.session.is_reported
            raise
        return 0

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


def _check_processes(job: TrainingJobSpec, environment: WorkerEnvironment) -> None:
    """SpecError where the job's number of processes is not the number that was started."""
    wanted, process = job.resources.processes * job.resources.nodes, environment.process
    faults = []
    if process is None and job.resources.nodes > 1:
        faults.append(
            f"resources.nodes: found {job.resources.nodes}, but a worker starts processes only on its own machine:"
            f" start `torchrun --nnodes {job.resources.nodes} --nproc-per-node {job.resources.processes} -m"
            " gen_worker.entrypoint` on each, or set it to 1"
        )
    if process is not None and process.world_size != wanted:
        faults.append(
            f"resources.processes: found {job.resources.processes} on {job.resources.nodes} nodes, but the worker was"
            f" started as {process.world_size} processes: make them agree"
        )
    if faults:
        raise SpecError(str(environment.job_spec_path), faults)


class _LogFormatter(logging.Formatter):
    """Tracebacks also name the original of a frozen file."""

    def format(self, record: logging.LogRecord) -> str:
        return name_originals(super().format(record))


def set_log_levels() -> None:
    """Of a worker. Setting a level visits every logger, so it is set only where it differs."""
    for name, level in ((None, logging.INFO), ("httpx", logging.WARNING)):  # httpx logs every request
        if logging.getLogger(name).level != level:
            logging.getLogger(name).setLevel(level)


def run_training_runtime_from_env() -> int:
    """Run the job that the environment names; 0 on success, else the root cause is raised."""
    runtime = TrainingRuntime()
    with runtime.redacted_logs():
        return runtime.run()


def _say(text: str) -> None:
    """For people. Where the log is on a full disk, the exit code alone says what happened."""
    with contextlib.suppress(OSError):
        print(mark_report(text), file=sys.stderr)  # noqa: T201


def run_worker(early_signals: Sequence[int] = ()) -> ExitCode:
    """As a process: an error becomes one message and an exit code; its traceback is in the log.

    `early_signals` grows until the attempt's lifecycle handles SIGTERM.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    set_log_levels()
    runtime = TrainingRuntime(early_signals=early_signals)
    with runtime.redacted_logs():
        try:
            runtime.run()
        except BaseException as cause:
            if issubclass(type(cause), WorkerError):
                logger.debug("the attempt failed", exc_info=True)
            else:
                logger.exception("the attempt failed")
            category = runtime.category or Category.STARTUP
            _, text = describe_failure(cause, phase=category)
            if runtime.process is not None and runtime.process.outcome_dir is not None:
                # The parent reports it, once for all processes. A stop that all agreed on is no failure.
                is_agreed = runtime.is_agreed_stop
                leave_outcome(
                    runtime.process,
                    category,
                    runtime.redact(text),
                    cause=find_cause(cause),
                    is_agreed=is_agreed,
                )
                return ExitCode.COMPLETED if is_agreed else EXIT_CODE_BY_CATEGORY[category]
            if is_our_fault(cause):
                _say(runtime.redact(text))
                return ExitCode.BUG
            _say(f"{category}: {runtime.redact(text)}")
            if find_cause(cause) == Cause.DISK_FULL and not runtime.is_reported:
                return ExitCode.DISK_FULL  # no event says so
            return EXIT_CODE_BY_CATEGORY[category]
    leave_outcome(runtime.process, None)
    return ExitCode.COMPLETED
