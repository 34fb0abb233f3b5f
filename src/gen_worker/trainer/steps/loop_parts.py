"""Everything that the loop and its helpers work with, in one record."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.attempt.state import TrainerState
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StepContext, TrainerPlugin
from gen_worker.trainer.processes.group import OneProcess, Processes
from gen_worker.trainer.restore.state_restorer import StateRestorer
from gen_worker.trainer.steps.batch_source import BatchSource
from gen_worker.trainer.steps.evaluation import Evaluator
from gen_worker.trainer.steps.parts import LoopArtifactWriter, LoopReporter, LoopUploader


@dataclass(slots=True, kw_only=True)
class LoopParts:
    """Of one attempt. `ctx.progress` and `ctx.is_canceled` are shared with the lifecycle's watcher."""

    job: TrainingJobSpec
    ctx: StepContext
    trainer: TrainerPlugin
    source: BatchSource
    reporter: LoopReporter
    artifacts: LoopArtifactWriter | None  # in the main process
    uploader: LoopUploader | None = None
    callbacks: CallbackList = field(default_factory=CallbackList)
    validation: Evaluator | None = None
    test: Evaluator | None = None
    restorer: StateRestorer
    processes: Processes = field(default_factory=OneProcess)
    trainer_state: TrainerState = field(default_factory=TrainerState)
    folder: Path = Path()  # of the run, for callbacks
    resume_hint: str = "run the job again to resume"
    load_checkpoint: Callable[[], Checkpoint | None] = lambda: None  # for a rollback

    @property
    def evaluators(self) -> list[Evaluator]:
        return [evaluator for evaluator in (self.validation, self.test) if evaluator is not None]
