"""A worker of `mode: inference`: environment or contract file -> job -> a model server or a prediction -> exit code."""

import os
import signal
from collections.abc import Mapping, Sequence

from gen_worker.contract import failpoints
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.serving import FOLDER
from gen_worker.errors import Category, ExitCode
from gen_worker.inference.environment import read_inference_job
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.attempt.session import AttemptSession
from gen_worker.trainer.attempt.worker_runtime import WorkerRuntime, run_as_process
from gen_worker.trainer.authz import SCOPE_SERVE


class InferenceRuntime(WorkerRuntime):
    def __init__(self, environ: Mapping[str, str] = os.environ, early_signals: Sequence[int] = ()) -> None:
        super().__init__(environ, early_signals)
        self._session: AttemptSession | None = None

    def run(self) -> int:
        """Serve until the end is requested, or predict; 0 when a prediction is completed. Else the root cause is raised,
        after its terminal event.
        """
        failpoints.arm_from_env()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its default action would end the process
        try:
            environment, job = read_inference_job(self._environ)
            self.process = environment.process
            token = self.take_token(environment)
            self.mask_secrets_of(job)
            os.environ.update({**job.env, **environment.extra_env})
            self._session = session = AttemptSession(
                environment=environment,
                run_id=job.run_id,
                owner=job.owner,
                heartbeat_s=job.heartbeat_s,
                grace_s=job.grace_s,
                time_limit_s=job.time_limit_s,
                token=token,
                redact=self.redact,
                early_signals=self._early_signals,
                is_stepwise=False,
            )
            _work(session, environment, job)
        except BaseException as cause:
            session_ = self._session
            self.note_failure(
                cause,
                phase=Category.STARTUP if session_ is None else session_.phase,
                has_agreed_to_stop=False,
                is_reported=session_ is not None and session_.is_reported,
            )
            raise
        return 0


def _work(session: AttemptSession, environment: WorkerEnvironment, job: TrainingJobSpec) -> None:
    from gen_worker.inference.model.parent import ModelParent
    from gen_worker.inference.versions import find_served, find_version, model_options

    trainer = environment.plugin or job.trainer
    section = job.serving or job.prediction
    assert section is not None, "a rule of the job"
    with ModelParent.start() as parent, session:  # before the session's threads
        session.start(mode=job.mode, name=job.name, trainer=trainer)
        session.authorize(SCOPE_SERVE)
        session.phase = Category.INPUT
        served = find_served(job, environment.checkpoints_dir.parent / FOLDER)
        if served is not None:  # the model is loaded beside what else a server needs
            parent.prepare(served, model_options(job).of_worker(0))
        version = find_version(section, trainer=trainer, base_dir=environment.job_dir)
        if job.prediction is not None:
            from gen_worker.inference.offline.run import run

            run(environment, job, session, version, parent)
            return
        from gen_worker.inference.front import event_loop
        from gen_worker.inference.server import ModelServer

        session.phase = Category.MODEL_LOAD
        server = ModelServer(session=session, job=job, version=version, parent=parent)
        event_loop.run(server.serve())


def run_worker(early_signals: Sequence[int] = ()) -> ExitCode:
    """As a process. `early_signals` grows until the attempt's lifecycle handles SIGTERM."""
    return run_as_process(InferenceRuntime(early_signals=early_signals))
