"""One attempt of one run in this process: from the lease to the one terminal event.

`Attempt.run` reads as the order in which an attempt comes to life. From the moment the event file is open, every way
out writes exactly one terminal event; before that (a folder that another worker holds) there is only the exception,
since the file is not ours to write.
"""

import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import FILE_NAME as LEASE_FILE
from gen_worker.contract.lease import RunLease, is_process_alive
from gen_worker.contract.screen_repr import screen_repr
from gen_worker.errors import Category, TrainingCanceled, TrainingTimeout
from gen_worker.trainer.attempt.assembly import Assembly, InjectedParts, is_finished
from gen_worker.trainer.attempt.failure import describe_failure, find_cause
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.attempt.upload_session import UploadSession
from gen_worker.trainer.authz import TrainerAuthContext, authorize_start
from gen_worker.trainer.contracts import Progress, StopSignal
from gen_worker.trainer.events.event_log import DiscardedEvents, EventLog
from gen_worker.trainer.job_lifecycle import JobLifecycle
from gen_worker.trainer.loop import TrainingLoop
from gen_worker.trainer.processes.outcome import leave_outcome
from gen_worker.trainer.reporting import TrainingReporter

logger = logging.getLogger("gen_worker.runtime")


@dataclass(slots=True, kw_only=True, repr=False)
class Attempt:
    """`phase` is, at each moment, the category that a fault of the author's code belongs to."""

    environment: WorkerEnvironment
    job: TrainingJobSpec
    injected: InjectedParts = field(default_factory=InjectedParts)
    token: str | None = None
    redact: Callable[[str], str] = str
    early_signals: Sequence[int] = ()
    echo_every_s: float | None = None
    grace_s: float | None = None
    phase: Category = field(default=Category.STARTUP, init=False)
    has_agreed_to_stop: bool = field(default=False, init=False)
    loop: TrainingLoop | None = field(
        default=None, init=False
    )  # from the moment it is ready, however it ends

    def __repr__(self) -> str:
        return screen_repr(self, {"run_id": self.job.run_id, "phase": str(self.phase), "loop": self.loop})

    @property
    def is_main(self) -> bool:
        return self.environment.process is None or self.environment.process.rank == 0

    def run(self) -> TrainingLoop:
        """Train to the end. The root cause of anything else is raised, after its terminal event."""
        with ExitStack() as stack:
            return self._run(stack)

    def _run(self, stack: ExitStack) -> TrainingLoop:
        environment, job = self.environment, self.job
        if job.fast_dev_run:
            self.environment = environment = _in_a_folder_apart(environment)
        lease = None
        if self.is_main:
            lease = RunLease.acquire(environment.checkpoints_dir, run_id=job.run_id, nonce=environment.nonce)
            stack.callback(lease.release)
            if job.fast_dev_run:
                _wipe(environment)
        stop, progress = StopSignal(), Progress()
        reporter = self._open_reporter(stop)
        stack.callback(reporter.close)
        lifecycle = stack.enter_context(
            JobLifecycle(
                reporter=reporter,
                stop=stop,
                progress=progress,
                heartbeat_s=job.heartbeat_s,
                grace_s=job.grace_s if self.grace_s is None else self.grace_s,
                time_limit_s=_shortest(job.time_limit_s, environment.max_runtime_s),
                cancel_file=environment.cancel_file,
            )
        )
        uploads: UploadSession | None = None
        try:
            self._take_early_stops(stop, lifecycle)
            reporter.started(run_id=job.run_id, **self._started_fields())
            self.phase = Category.AUTH
            auth = self._authorize()
            if self.is_main:
                uploads = UploadSession(environment, job, auth, reporter, stop)
                stack.callback(uploads.close)
            assembly = Assembly(
                environment=environment,
                job=job,
                injected=self.injected,
                auth=auth,
                reporter=reporter,
                uploader=None if uploads is None else uploads.uploader,
                lease=lease,
                stop=stop,
                progress=progress,
                stack=stack,
                lifecycle=lifecycle,
            )
            try:
                self.loop = loop = assembly.build()
            finally:
                self.phase = assembly.phase
            if not is_finished(loop):
                self.phase = Category.TRAIN_STEP
                try:
                    loop.run()
                finally:
                    self.has_agreed_to_stop = loop.stop_step is not None
            self.phase = Category.UPLOAD
            if uploads is not None:
                uploads.settle()
        except BaseException as cause:
            self._fail(cause, lifecycle, uploads, progress)
            raise
        reason = loop.trainer_state.stop_reason
        lifecycle.complete(loop.final_checkpoint, **({} if reason is None else {"reason": reason}))
        early = "" if reason is None else f" (stopped early: {reason})"
        logger.info("completed at step %d%s: %s", progress.step, early, loop.final_checkpoint)
        if uploads is not None:
            uploads.tell_completed(progress.step, loop.final_checkpoint)
        return loop

    def _fail(
        self,
        cause: BaseException,
        lifecycle: JobLifecycle,
        uploads: UploadSession | None,
        progress: Progress,
    ) -> None:
        category, error = describe_failure(cause, phase=self.phase)
        try:
            if not self._is_told_by_launcher(cause):
                named = find_cause(cause)
                lifecycle.fail(category, error, **({"cause": named} if named else {}))
        except BaseException:  # the cause is still the thing to tell
            logger.exception("the terminal event could not be written")
        if uploads is not None:
            uploads.tell_failed(progress.step, category, error)

    def _is_told_by_launcher(self, cause: BaseException) -> bool:
        """Of several processes that fail, the launcher alone can tell which was the first."""
        process = self.environment.process
        is_ours = process is not None and process.outcome_dir is not None and _is_alive(process.launcher)
        return is_ours and not issubclass(type(cause), TrainingCanceled | TrainingTimeout)

    def _open_reporter(self, stop: StopSignal) -> TrainingReporter:
        environment, run_id = self.environment, self.job.run_id
        return TrainingReporter(
            environment.events_path,
            run_id=run_id,
            log=EventLog(
                environment.events_path,
                run_id=run_id,
                attempt=environment.attempt,
                nonce=environment.nonce,
                doorbell=environment.doorbell,
            )
            if self.is_main
            else DiscardedEvents(),
            redact=self.redact,
            echo_every_s=self.echo_every_s if self.is_main else None,
            stop=stop,
        )

    def _take_early_stops(self, stop: StopSignal, lifecycle: JobLifecycle) -> None:
        if self.early_signals:
            stop.request(f"cancelled by {signal.Signals(self.early_signals[0]).name}")
        if self.environment.is_cancelled:
            stop.request("cancelled: TRAINER_CANCELLED is set")
        process = self.environment.process
        lifecycle.on_overrun = lambda category, error: leave_outcome(process, category, error)
        if process is not None and process.rank == 0 and process.launcher is not None:
            launcher = process.launcher

            def look() -> None:
                if not _is_alive(launcher):
                    stop.request("cancelled: the process that started this run is gone")

            lifecycle.on_look.append(look)

    def _authorize(self) -> TrainerAuthContext | None:
        return authorize_start(
            orchestrated=self.environment.is_orchestrated,
            token=self.token,
            public_key_pem=self.environment.capability_public_key,
            run_id=self.job.run_id,
            owner=self.job.owner,
        )

    def _started_fields(self) -> dict[str, Any]:
        job, process = self.job, self.environment.process
        trainer = self.environment.plugin or job.trainer
        if trainer is None and self.injected.trainer is not None:
            kind = type(self.injected.trainer)
            trainer = f"{kind.__module__}:{kind.__qualname__}"
        fields: dict[str, Any] = {
            "trainer": trainer,
            "name": job.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "max_steps": job.max_steps,
            "epochs": job.epochs,
        }
        if process is not None:
            fields["processes"] = process.world_size
        return fields


def _wipe(environment: WorkerEnvironment) -> None:
    """Clear what the trial run before this one left, under its lease."""
    shutil.rmtree(environment.samples_dir, ignore_errors=True)
    for path in environment.checkpoints_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LEASE_FILE:
            path.unlink(missing_ok=True)


def _in_a_folder_apart(environment: WorkerEnvironment) -> WorkerEnvironment:
    """What a trial run saves is wiped by the next one, and no real run can take it for its own."""
    folder = environment.checkpoints_dir.parent / "fast_dev_run"
    return msgspec.structs.replace(
        environment, checkpoints_dir=folder / "checkpoints", samples_dir=folder / "samples"
    )


def _is_alive(launcher: str | None) -> bool:
    if launcher is None:
        return False
    pid, _, ticks = launcher.partition(":")
    return is_process_alive(int(pid), int(ticks) if ticks else None)


def _shortest(*limits_s: float | None) -> float | None:
    return min((limit for limit in limits_s if limit is not None), default=None)
