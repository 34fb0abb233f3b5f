"""One attempt of a run in this process, in any worker mode: lease, event file, signals, heartbeat, terminal event.

Nothing here is about training: a trainer and a model server open the same session. While it is open, every way out
writes exactly one terminal event. Where the lease is held by another worker there is only the exception, since the
event file belongs to that worker.
"""

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gen_worker.contract.job.spec import InputsSpec
from gen_worker.contract.lease import RunLease
from gen_worker.contract.process_identity import is_process_alive
from gen_worker.errors import Category, StartupError, TrainingCanceled, TrainingTimeout
from gen_worker.trainer.attempt.failure import describe_failure, find_cause, find_place, is_our_fault
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.authz import SCOPE_TRAIN, TrainerAuthContext, authorize_start
from gen_worker.trainer.contracts import Progress, StopSignal
from gen_worker.trainer.events.event_log import DiscardedEvents, EventLog
from gen_worker.trainer.inputs import MaterializedInputs, materialize_inputs
from gen_worker.trainer.job_lifecycle import JobLifecycle, raise_stop
from gen_worker.trainer.processes.outcome import leave_outcome
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.transfer.input_cache import InputCache

logger = logging.getLogger("gen_worker.runtime")


@dataclass(slots=True, kw_only=True)
class AttemptSession:
    """Enter it in the main thread. `stop` is set by a cancel or the time limit; `progress` is what a heartbeat shows.

    `phase` is the category of an exception that is none of ours. `stack` closes what the worker opens, before the
    event file and the lease.
    """

    environment: WorkerEnvironment
    run_id: str
    owner: str | None = None
    heartbeat_s: float = 5.0
    grace_s: float = 60.0
    time_limit_s: float | None = None
    token: str | None = None
    redact: Callable[[str], str] = str
    early_signals: Sequence[int] = ()  # received before the session was opened
    echo_every_s: float | None = None
    is_stepwise: bool = True  # it stops after a step, and has saved by then
    phase: Category = field(default=Category.STARTUP, init=False)
    stop: StopSignal = field(default_factory=StopSignal, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    stack: ExitStack = field(default_factory=ExitStack, init=False)
    lease: RunLease | None = field(default=None, init=False)  # in the main process
    reporter: TrainingReporter = field(init=False)
    lifecycle: JobLifecycle = field(init=False)
    is_reported: bool = field(
        default=False, init=False
    )  # a failure has its terminal event, or its parent writes it
    _failure: tuple[Category, str] | None = field(default=None, init=False)

    @property
    def is_main(self) -> bool:
        return self.environment.process is None or self.environment.process.rank == 0

    def __enter__(self) -> Self:
        environment = self.environment
        with ExitStack() as stack:
            if self.is_main:
                self.lease = RunLease.acquire(
                    environment.checkpoints_dir, run_id=self.run_id, nonce=environment.nonce
                )
                stack.callback(self.lease.release)
            self.reporter = self._open_reporter()
            stack.callback(self.reporter.close)
            limits_s = [
                limit for limit in (self.time_limit_s, environment.max_runtime_s) if limit is not None
            ]
            self.lifecycle = stack.enter_context(
                JobLifecycle(
                    reporter=self.reporter,
                    stop=self.stop,
                    progress=self.progress,
                    heartbeat_s=self.heartbeat_s,
                    grace_s=self.grace_s,
                    time_limit_s=min(limits_s, default=None),
                    cancel_file=environment.cancel_file,
                    is_stepwise=self.is_stepwise,
                )
            )
            self.stack = stack.pop_all()
        self._watch_for_stops()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.stack:
            if cause is None and self.reporter.terminal_event is None:
                cause = StartupError("the worker ended without a result")
            if cause is not None:
                self.fail(cause)

    def start(self, **fields: Any) -> None:
        """Write `started`; `fields` are the mode's own."""
        process = self.environment.process
        shared = {} if process is None else {"processes": process.world_size}
        self.reporter.started(
            run_id=self.run_id, **fields, pid=os.getpid(), host=socket.gethostname(), **shared
        )

    def authorize(self, scope: str = SCOPE_TRAIN) -> TrainerAuthContext | None:
        """AuthError where the worker needs a capability token and has no valid one for this."""
        self.phase = Category.AUTH
        return authorize_start(
            orchestrated=self.environment.is_orchestrated,
            token=self.token,
            public_key_pem=self.environment.capability_public_key,
            run_id=self.run_id,
            owner=self.owner,
            scope=scope,
        )

    def complete(self, final_checkpoint: Path | None = None, **fields: Any) -> None:
        """Write `completed`, unless a terminal event is written already."""
        self.reporter.completed(step=self.progress.step, final_checkpoint=final_checkpoint, **fields)

    def fail(self, cause: BaseException) -> tuple[Category, str]:
        """Write `failed`, unless a terminal event is written already. Returns its category and text; never raises."""
        if self._failure is None:
            category, error = self._failure = describe_failure(cause, phase=self.phase)
            try:
                if not self._is_reported_by_parent(cause):
                    self.reporter.failed(
                        step=self.progress.step,
                        error=error,
                        category=category,
                        cause=find_cause(cause),
                        fault="trn" if is_our_fault(cause) else "",
                        values={"place": place} if (place := find_place(cause)) else None,
                    )
                self.is_reported = True
            except BaseException:  # `cause` is what the caller must see
                logger.exception("the terminal event could not be written")
        return self._failure

    def _is_reported_by_parent(self, cause: BaseException) -> bool:
        """Of several processes that fail, only the parent knows which was the first."""
        process = self.environment.process
        has_parent = process is not None and process.outcome_dir is not None and _is_alive(process.parent)
        return has_parent and not issubclass(type(cause), TrainingCanceled | TrainingTimeout)

    def _open_reporter(self) -> TrainingReporter:
        environment = self.environment
        log: EventLog | DiscardedEvents = DiscardedEvents()
        if self.is_main:
            log = EventLog(
                environment.events_path,
                run_id=self.run_id,
                attempt=environment.attempt,
                nonce=environment.nonce,
                doorbell=environment.doorbell,
            )
        return TrainingReporter(
            environment.events_path,
            run_id=self.run_id,
            log=log,
            redact=self.redact,
            echo_every_s=self.echo_every_s if self.is_main else None,
            stop=self.stop,
        )

    def _watch_for_stops(self) -> None:
        if self.early_signals:
            self.stop.request(f"cancelled by {signal.Signals(self.early_signals[0]).name}")
        if self.environment.is_cancelled:
            self.stop.request("cancelled: TRAINER_CANCELLED is set")
        process = self.environment.process
        self.lifecycle.on_overrun = lambda category, error: leave_outcome(process, category, error)
        if process is not None and process.rank == 0 and process.parent is not None:
            parent = process.parent

            def look() -> None:
                if not _is_alive(parent):
                    self.stop.request("cancelled: the process that started this run has exited")

            self.lifecycle.on_look.append(look)


def fetch_inputs(
    environment: WorkerEnvironment,
    inputs: InputsSpec,
    *,
    auth: TrainerAuthContext | None,
    reporter: TrainingReporter,
    stop: StopSignal,
) -> MaterializedInputs:
    """Download what the job names, with a `log` event for every tenth of a file. A stop request ends it. Blocks."""
    reported: dict[str, int] = {}

    def report(name: str, received_bytes: int, total_bytes: int | None) -> None:
        if stop:
            raise_stop(stop)
        tenth = 10 * received_bytes // total_bytes if total_bytes else received_bytes >> 28
        if tenth > reported.get(name, 0):
            reported[name] = tenth
            reporter.log(
                f"fetching {name}: {received_bytes} of {total_bytes or 'an unknown number of'} bytes",
                received_bytes=received_bytes,
                total_bytes=total_bytes,
            )

    return materialize_inputs(
        base_model_ref=inputs.base_model_ref,
        dataset_parquet_refs=inputs.dataset_parquet_refs,
        resume_checkpoint_ref=inputs.resume_checkpoint_ref,
        cache=InputCache(environment.cache_dir / "inputs"),
        auth=auth,
        base_dir=environment.job_dir,
        on_progress=report,
        options=environment.transfer_options(),
    )


def _is_alive(parent: str | None) -> bool:
    if parent is None:
        return False
    pid, _, ticks = parent.partition(":")
    return is_process_alive(int(pid), int(ticks) if ticks else None)
