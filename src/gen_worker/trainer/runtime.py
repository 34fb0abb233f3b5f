"""The one assembler: environment or contract file -> parts -> loop -> exit code.

`TrainingRuntime.run` reads as the order in which an attempt comes to life. From the moment the event file is open,
every way out writes exactly one terminal event; before that (a job that cannot be read, a folder that another worker
holds) the reason goes to stderr alone, since the file is not ours to write.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gen_worker import failpoints
from gen_worker.errors import EXIT_CODE_BY_CATEGORY, Category, ExitCode, SpecError, WorkerError
from gen_worker.trainer.assembly import Assembly, is_finished
from gen_worker.trainer.authz import TrainerAuthContext, authorize_start
from gen_worker.trainer.contracts import Progress, StopSignal, TrainingJobSpec
from gen_worker.trainer.failure import describe_failure, is_our_fault
from gen_worker.trainer.isolation import run_isolated
from gen_worker.trainer.job_lifecycle import JobLifecycle
from gen_worker.trainer.job_spec import read_job_spec
from gen_worker.trainer.lease import RunLease
from gen_worker.trainer.redaction import SecretRedactor
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.runtime_env import WorkerEnvironment, read_environment, take_capability_token
from gen_worker.trainer.upload_session import UploadSession

logger = logging.getLogger("gen_worker.runtime")

ECHO_EVERY_S = 2.0


class TrainingRuntime:
    """One attempt of one run, in this process. `category` is set when it failed."""

    def __init__(self, environ: Mapping[str, str] = os.environ, early_signals: Sequence[int] = ()) -> None:
        self._environ = environ
        self._early_signals = early_signals
        self._echo_every_s = ECHO_EVERY_S if sys.stderr.isatty() else None
        self._redactor = SecretRedactor()
        self.category: Category | None = None
        self._phase = Category.STARTUP

    def redact(self, text: str) -> str:
        return self._redactor.redact(text)

    def run(self) -> int:
        """Train; 0 when the run is complete. The root cause of anything else is raised, after its terminal event."""
        failpoints.arm_from_env()
        try:
            environment = read_environment(self._environ)
            token = take_capability_token(self._environ)
            self._redactor.add(token)
            job = read_job_spec(environment.job_spec_path)
            _refuse_what_is_not_here_yet(job, source=str(environment.job_spec_path))
            if environment.is_isolated:
                return run_isolated(environment, job, token=token, redact=self.redact)
            with ExitStack() as stack:
                return self._attempt(environment, job, token, stack)
        except BaseException as cause:
            self.category, _ = describe_failure(cause, phase=self._phase)
            raise

    def _attempt(
        self, environment: WorkerEnvironment, job: TrainingJobSpec, token: str | None, stack: ExitStack
    ) -> int:
        lease = RunLease.acquire(environment.checkpoints_dir, run_id=job.run_id)
        stack.callback(lease.release)
        reporter = TrainingReporter(
            environment.events_path, run_id=job.run_id, redact=self.redact, echo_every_s=self._echo_every_s
        )
        stack.callback(reporter.close)
        stop, progress = StopSignal(), Progress()
        lifecycle = stack.enter_context(
            JobLifecycle(
                reporter=reporter,
                stop=stop,
                progress=progress,
                heartbeat_s=job.heartbeat_s,
                grace_s=job.grace_s,
                time_limit_s=_shortest(job.time_limit_s, environment.max_runtime_s),
                cancel_file=environment.cancel_file,
            )
        )
        uploads: UploadSession | None = None
        try:
            if self._early_signals:
                stop.request(f"cancelled by {signal.Signals(self._early_signals[0]).name}")
            if environment.is_cancelled:
                stop.request("cancelled: TRAINER_CANCELLED is set")
            plugin = environment.plugin or job.trainer
            reporter.started(**_started_fields(job, plugin))
            self._phase = Category.AUTH
            auth = _authorize(environment, job, token)
            uploads = UploadSession(environment, job, auth, reporter, stop)
            stack.callback(uploads.close)
            assembly = Assembly(
                environment=environment,
                job=job,
                plugin=plugin,
                auth=auth,
                reporter=reporter,
                uploader=uploads.uploader,
                lease=lease,
                stop=stop,
                progress=progress,
                stack=stack,
            )
            try:
                loop = assembly.build()
            finally:
                self._phase = assembly.phase
            if not is_finished(loop):
                self._phase = Category.TRAIN_STEP
                loop.run()
            self._phase = Category.UPLOAD
            uploads.settle()
        except BaseException as cause:
            category, error = describe_failure(cause, phase=self._phase)
            try:
                lifecycle.fail(category, error)
            except Exception:  # the cause is still the thing to tell
                logger.exception("the terminal event could not be written")
            if uploads is not None:
                uploads.tell_failed(progress.step, category, error)
            raise
        lifecycle.complete(loop.final_checkpoint)
        logger.info("completed at step %d: %s", progress.step, loop.final_checkpoint)
        uploads.tell_completed(progress.step, loop.final_checkpoint)
        return 0

    @contextlib.contextmanager
    def redacted_logs(self) -> Iterator[None]:
        """While it is entered, no log line of this process shows a secret."""
        # On the handlers: a logger's own filter would not see its children's records.
        handlers = list(logging.getLogger().handlers)
        for handler in handlers:
            handler.addFilter(self._redactor)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(self._redactor)


def _authorize(
    environment: WorkerEnvironment, job: TrainingJobSpec, token: str | None
) -> TrainerAuthContext | None:
    return authorize_start(
        orchestrated=environment.is_orchestrated,
        token=token,
        public_key_pem=environment.capability_public_key,
        run_id=job.run_id,
        owner=job.owner,
    )


def _started_fields(job: TrainingJobSpec, plugin: str | None) -> dict[str, Any]:
    return {
        "trainer": plugin,
        "name": job.name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "max_steps": job.max_steps,
        "epochs": job.epochs,
    }


def _shortest(*limits_s: float | None) -> float | None:
    return min((limit for limit in limits_s if limit is not None), default=None)


def _refuse_what_is_not_here_yet(job: TrainingJobSpec, *, source: str) -> None:
    asked = {
        "validate_every": bool(job.validate_every),
        "early_stopping": job.early_stopping is not None,
        "callbacks": bool(job.callbacks),
        "validation": job.validation is not None,
        "test": job.test is not None,
        "resources.processes": job.resources.processes > 1,
        "resources.nodes": job.resources.nodes > 1,
    }
    faults = [
        f"{name}: this release does not act on it yet: leave it out"
        for name, is_asked in asked.items()
        if is_asked
    ]
    if faults:
        raise SpecError(source, faults)


def run_training_runtime_from_env() -> int:
    """Run the job that the environment names; 0 on success. The root cause of a failure is raised."""
    runtime = TrainingRuntime()
    with runtime.redacted_logs():
        return runtime.run()


def run_worker(early_signals: Sequence[int] = ()) -> ExitCode:
    """As a process: errors become exit codes, a person reads one message, the traceback is in the log.

    `early_signals` grows while nobody else handles SIGTERM: until the attempt's own lifecycle does.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request is no news
    runtime = TrainingRuntime(early_signals=early_signals)
    with runtime.redacted_logs():
        try:
            runtime.run()
        except BaseException as cause:
            if isinstance(cause, WorkerError):
                logger.debug("the attempt failed", exc_info=True)
            else:
                logger.exception("the attempt failed")
            category = runtime.category or Category.STARTUP
            _, text = describe_failure(cause, phase=category)
            if is_our_fault(cause):
                print(f"gen_worker: {runtime.redact(text)}", file=sys.stderr)  # noqa: T201
                return ExitCode.BUG
            print(f"gen_worker: {category}: {runtime.redact(text)}", file=sys.stderr)  # noqa: T201
            return EXIT_CODE_BY_CATEGORY[category]
    return ExitCode.COMPLETED
