"""A training worker: environment or contract file -> job -> `Trainer` -> exit code.

A run of several processes goes to torchrun (`processes.torchrun`), which starts this runtime in each of them.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from gen_worker.contract import failpoints
from gen_worker.contract.job.rules import read_job_spec
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import Category, ExitCode, SpecError
from gen_worker.trainer.attempt.isolation import run_isolated
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment, read_environment
from gen_worker.trainer.attempt.worker_runtime import WorkerRuntime, run_as_process
from gen_worker.trainer.compute.heap import keep_freed_memory
from gen_worker.trainer.processes.outcome import report_start
from gen_worker.trainer.processes.torchrun import run_processes
from gen_worker.trainer.trainer import Trainer

ECHO_EVERY_S = 2.0


class TrainingRuntime(WorkerRuntime):
    def __init__(self, environ: Mapping[str, str] = os.environ, early_signals: Sequence[int] = ()) -> None:
        super().__init__(environ, early_signals)
        self._echo_every_s = ECHO_EVERY_S if sys.stderr.isatty() else None

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
            token = self.take_token(environment)
            job = read_job_spec(environment.job_spec_path)
            self.mask_secrets_of(job)
            _check_job(job, environment)
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
            self.note_failure(
                cause,
                phase=Category.STARTUP if attempt is None else attempt.phase,
                has_agreed_to_stop=attempt is not None and attempt.has_agreed_to_stop,
                is_reported=attempt is not None and attempt.session.is_reported,
            )
            raise
        return 0


def _check_job(job: TrainingJobSpec, environment: WorkerEnvironment) -> None:
    """SpecError where the job is for another mode, or for another number of processes than was started."""
    wanted, process = job.resources.processes * job.resources.nodes, environment.process
    faults = []
    if job.mode != "trainer":
        faults.append(
            f'mode: found "{job.mode}", but this worker trains: start it with WORKER_MODE={job.mode}'
        )
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


def run_training_runtime_from_env() -> int:
    """Run the job that the environment names; 0 on success, else the root cause is raised."""
    runtime = TrainingRuntime()
    with runtime.redacted_logs():
        return runtime.run()


def run_worker(early_signals: Sequence[int] = ()) -> ExitCode:
    """As a process. `early_signals` grows until the attempt's lifecycle handles SIGTERM."""
    return run_as_process(TrainingRuntime(early_signals=early_signals))
