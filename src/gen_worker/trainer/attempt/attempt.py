"""One training attempt in this process: a session, the parts, the loop, the uploads, the terminal event."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.lease import FILE_NAME as LEASE_FILE
from gen_worker.contract.screen_repr import screen_repr
from gen_worker.errors import END_LOGGER, Category
from gen_worker.trainer.attempt.assembly import Assembly, InjectedParts, is_finished
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment
from gen_worker.trainer.attempt.session import AttemptSession
from gen_worker.trainer.attempt.upload_session import UploadSession
from gen_worker.trainer.loop import TrainingLoop

logger = logging.getLogger("gen_worker.runtime")


@dataclass(slots=True, kw_only=True, repr=False)
class Attempt:
    """`phase` is the category of an exception of the author's code. `options` are those of `AttemptSession`."""

    environment: WorkerEnvironment
    job: TrainingJobSpec
    injected: InjectedParts = field(default_factory=InjectedParts)
    options: Mapping[str, Any] = field(default_factory=dict)
    session: AttemptSession = field(init=False)
    has_agreed_to_stop: bool = field(default=False, init=False)
    loop: TrainingLoop | None = field(default=None, init=False)  # once it is built, however the attempt ends

    def __post_init__(self) -> None:
        job = self.job
        if job.fast_dev_run:
            self.environment = _for_trial_run(self.environment)
        limits = {"grace_s": job.grace_s, "heartbeat_s": job.heartbeat_s, "time_limit_s": job.time_limit_s}
        self.session = AttemptSession(
            environment=self.environment, run_id=job.run_id, owner=job.owner, **{**limits, **self.options}
        )

    def __repr__(self) -> str:
        return screen_repr(self, {"run_id": self.job.run_id, "phase": str(self.phase), "loop": self.loop})

    @property
    def phase(self) -> Category:
        return self.session.phase

    def run(self) -> TrainingLoop:
        """Train to the end. The root cause of anything else is raised, after its terminal event."""
        with self.session as session:
            if self.job.fast_dev_run and session.is_main:
                _wipe(self.environment)
            return self._run(session)

    def _run(self, session: AttemptSession) -> TrainingLoop:
        uploads: UploadSession | None = None
        try:
            session.start(**self._started_fields())
            auth = session.authorize()
            if session.is_main:
                uploads = UploadSession(self.environment, self.job, auth, session.reporter, session.stop)
                session.stack.callback(uploads.close)
            assembly = Assembly(
                environment=self.environment,
                job=self.job,
                injected=self.injected,
                auth=auth,
                reporter=session.reporter,
                uploader=None if uploads is None else uploads.uploader,
                lease=session.lease,
                stop=session.stop,
                progress=session.progress,
                stack=session.stack,
                lifecycle=session.lifecycle,
            )
            try:
                self.loop = loop = assembly.build()
            finally:
                session.phase = assembly.phase
            if not is_finished(loop):
                session.phase = Category.TRAIN_STEP
                try:
                    loop.run()
                finally:
                    self.has_agreed_to_stop = loop.stop_step is not None
            session.phase = Category.UPLOAD
            if uploads is not None:
                uploads.settle()
        except BaseException as cause:
            category, error = session.fail(cause)
            if uploads is not None:
                uploads.send_failed(session.progress.step, category, error)
            raise
        step, reason = session.progress.step, loop.parts.trainer_state.stop_reason
        session.complete(loop.final_checkpoint, **({} if reason is None else {"reason": reason}))
        early = "" if reason is None else f" (stopped early: {reason})"
        logging.getLogger(END_LOGGER).info("completed at step %d%s: %s", step, early, loop.final_checkpoint)
        if uploads is not None:
            uploads.send_completed(step, loop.final_checkpoint)
        return loop

    def _started_fields(self) -> dict[str, Any]:
        job = self.job
        trainer = self.environment.plugin or job.trainer
        if trainer is None and self.injected.trainer is not None:
            kind = type(self.injected.trainer)
            trainer = f"{kind.__module__}:{kind.__qualname__}"
        return {"trainer": trainer, "name": job.name, "max_steps": job.max_steps, "epochs": job.epochs}


def _wipe(environment: WorkerEnvironment) -> None:
    """Delete what the trial run before this one saved, under its lease."""
    shutil.rmtree(environment.samples_dir, ignore_errors=True)
    shutil.rmtree(environment.checkpoints_dir.parent / "videos", ignore_errors=True)
    for path in environment.checkpoints_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LEASE_FILE:
            path.unlink(missing_ok=True)


def _for_trial_run(environment: WorkerEnvironment) -> WorkerEnvironment:
    """In a folder of its own: the next trial run wipes it, and no real run resumes from it."""
    folder = environment.checkpoints_dir.parent / "fast_dev_run"
    return msgspec.structs.replace(
        environment, checkpoints_dir=folder / "checkpoints", samples_dir=folder / "samples"
    )
