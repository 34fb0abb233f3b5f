"""`Trainer`: train, validate and test a trainer class. Workers and notebooks use the same one.

`train` is one whole attempt in the caller's process, with lease, events and checkpoints. Called again on the same
folder, it resumes from the newest checkpoint.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from gen_worker.contract.job.rules import find_unreported
from gen_worker.contract.job.run_ids import run_id_from
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.screen_repr import Verbatim, screen_repr
from gen_worker.errors import SpecError, StartupError, TrainingCanceled, TrainingTimeout
from gen_worker.trainer.api import load_trainer_plugin
from gen_worker.trainer.attempt.assembly import Assembly, InjectedParts
from gen_worker.trainer.attempt.attempt import Attempt
from gen_worker.trainer.attempt.runtime_env import WorkerEnvironment, read_library_environment
from gen_worker.trainer.attempt.state import MetricsRecord, TrainerState
from gen_worker.trainer.attempt.trainer_config import TrainerConfig, debug_settings
from gen_worker.trainer.author.hooks import check_hooks
from gen_worker.trainer.callbacks.base import Callback
from gen_worker.trainer.checkpoints.export import load_checkpoint
from gen_worker.trainer.contracts import StopSignal, TrainerPlugin
from gen_worker.trainer.events.event_log import DiscardedEvents
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.loop import TrainingLoop
from gen_worker.trainer.model_runtime import capture_rng, restore_rng
from gen_worker.trainer.reporting import TrainingReporter
from gen_worker.trainer.sources.opening import CallerData, refuse_unused_settings
from gen_worker.trainer.steps.evaluation import Evaluator, Kind

logger = logging.getLogger("gen_worker.trainer")

Data = Any  # paths, a BatchSource, batches, or what `sources.opening` takes


@runtime_checkable
class TrainerInterface(Protocol):
    """`train` changes weights; `validate` and `test` never do."""

    def train(self) -> MetricsRecord: ...
    def validate(self) -> MetricsRecord: ...
    def test(self) -> MetricsRecord: ...


class Trainer(TrainerInterface):
    """Runs any trainer class in the worker's loop.

    `trainer`: the class, an instance, or `module:symbol`. Data: parquet paths (files, folders, globs), a Dataset, a
    DataLoader, another iterable, a list of batches in memory, or a `BatchSource`. `folder` holds all files of the run;
    a later `train` resumes from it.
    """

    def __init__(
        self,
        trainer: TrainerPlugin | type | str,
        config: TrainerConfig,
        *,
        train_data: Data,
        validation_data: Data = None,
        test_data: Data = None,
        callbacks: Sequence[Callback] = (),
        folder: str | Path = "runs/notebook",
    ) -> None:
        if not isinstance(callbacks, list | tuple):
            raise StartupError(
                f"callbacks: found {callbacks!r:.60}, expected a list: [{type(callbacks).__name__}()]"
            )
        for item in callbacks:
            if isinstance(item, type) and issubclass(item, Callback):
                raise StartupError(f"callbacks: found the class {item.__name__}: write {item.__name__}()")
            if not isinstance(item, Callback):
                raise StartupError(
                    f"callbacks: found {item!r:.60}, expected a list of instances of gen_worker.trainer.Callback"
                )
        refuse_unused_settings(config, train_data, (validation_data, test_data))
        train = CallerData.of(train_data, config)
        validation, test = (
            CallerData.of(data, config, is_held_out=True) for data in (validation_data, test_data)
        )
        stopping = config.early_stopping
        if stopping is not None and validation_data is None and not stopping.metric.startswith("train/"):
            raise SpecError(
                "Trainer",
                [
                    f"early_stopping.metric: found {stopping.metric!r}, but nothing is validated: give validation_data, or"
                    ' watch a metric that starts with "train/"'
                ],
            )
        folder = Path(folder).absolute()
        job = config.to_job(
            run_id_from(folder.name),
            train=train.paths,
            validation=validation.paths,
            test=test.paths,
            has_validation=validation_data is not None,
        )
        if faults := list(find_unreported(msgspec.to_builtins(job))):
            raise SpecError("Trainer", faults)
        self._open(
            environment=read_library_environment(folder),
            job=job,
            injected=InjectedParts(
                trainer=_build(trainer),
                train=train.source,
                validation=validation.source,
                test=test.source,
                callbacks=tuple(callbacks),
            ),
            grace_s=float("inf"),  # killing a notebook's process would lose more than a step
        )

    @classmethod
    def for_worker(cls, environment: WorkerEnvironment, job: TrainingJobSpec, **options: Any) -> "Trainer":
        """The trainer of a worker process, from its environment and job. `options`: see `AttemptSession`."""
        trainer = cls.__new__(cls)
        trainer._open(environment=environment, job=job, injected=InjectedParts(), **options)
        return trainer

    @staticmethod
    def load(path: str | Path) -> dict[str, Any]:
        """The nested state of a run's newest checkpoint, or of the one named: see `load_checkpoint`."""
        return load_checkpoint(path)

    def _open(
        self, *, environment: WorkerEnvironment, job: TrainingJobSpec, injected: InjectedParts, **options: Any
    ) -> None:
        self._environment = environment
        self._job = debug_settings(job)
        self._injected = injected
        self._options = options
        self._loop: TrainingLoop | None = None
        self.attempt: Attempt | None = None

    def __repr__(self) -> str:
        state, trainer = self.state, self._injected.trainer
        shown: dict[str, object] = {
            "trainer": Verbatim(self._job.trainer if trainer is None else type(trainer).__qualname__),
            "run_id": self._job.run_id,
            "folder": self._environment.checkpoints_dir.parent,
        }
        if state is None:
            return screen_repr(self, {**shown, "step": Verbatim("<not trained yet>")})
        end = self._loop.end_step() if self._loop is not None else None
        return screen_repr(
            self,
            {**shown, "step": state.step, "end_step": end, "epoch": state.epoch, "metrics": state.metrics},
        )

    @property
    def job(self) -> TrainingJobSpec:
        """What is trained, as a job."""
        return self._job

    @property
    def state(self) -> TrainerState | None:
        """Step, epoch and metrics, also after an interrupt or an error. None before the first `train`."""
        return None if self._loop is None else self._loop.parts.trainer_state

    @property
    def model_state(self) -> Any:
        """What the author's `configure` returned, as trained so far; also after an interrupt or an error."""
        return None if self._loop is None else self._loop.state

    def train(self) -> MetricsRecord:
        """Train to the end, from the newest checkpoint in the folder if there is one.

        Raises the root cause of a failure, and TrainingCanceled after Ctrl-C. Both write a terminal event, and a
        checkpoint if the state is sound.
        """
        started_s = time.monotonic()
        self.attempt = Attempt(
            environment=self._environment, job=self._job, injected=self._injected, options=self._options
        )
        try:
            loop = self.attempt.run()
            is_finished = loop.state is None
        except (TrainingCanceled, TrainingTimeout) as stop:
            if self._environment.is_library and not hasattr(stop, "__notes__"):
                stop.add_note("nothing was saved: no step was completed")
            raise stop.with_traceback(None) from None  # the place in our loop does not matter
        finally:
            self._keep(self.attempt.loop)
        if is_finished and self._injected.trainer is not None:  # a worker has logged it
            logger.warning(
                "nothing was trained: the run in %s is finished at step %d. Raise epochs or max_steps, or use another"
                " folder",
                self._environment.checkpoints_dir.parent,
                loop.parts.trainer_state.step,
            )
        state = loop.parts.trainer_state
        return MetricsRecord(
            kind="train",
            step=state.step,
            epoch=state.epoch,
            metrics=dict(state.metrics),
            rows=state.samples_seen,
            duration_s=time.monotonic() - started_s,
            checkpoint=loop.final_checkpoint,
            stop_reason=state.stop_reason,
        )

    def _keep(self, loop: TrainingLoop | None) -> None:
        """Keep the loop of an attempt, also of one that failed. Without a state of its own it keeps the last one's."""
        if loop is not None:
            if loop.state is None and self._loop is not None:
                loop.state = self._loop.state  # the run was finished
            self._loop = loop

    def validate(self) -> MetricsRecord:
        """One pass over the validation data. Weights: after `train` those in memory, else of the newest checkpoint,
        else fresh ones. Writes no events and changes nothing.
        """
        return self._evaluate("validation")

    def test(self) -> MetricsRecord:
        """`validate`, on the test data and with `test_step`."""
        return self._evaluate("test")

    def _evaluate(self, kind: Kind) -> MetricsRecord:
        rng = capture_rng()  # building a model seeds everything
        with ExitStack() as stack:
            stack.callback(restore_rng, rng)
            assembly = Assembly(
                environment=self._environment,
                job=self._job,
                injected=self._injected,
                reporter=TrainingReporter(Path(), run_id=self._job.run_id, log=DiscardedEvents()),
                stack=stack,
            )
            if self._loop is None or self._loop.state is None:
                evaluator, state = assembly.build_evaluation(kind)
            else:
                evaluator, state = (
                    self._evaluator_after_training(assembly, self._loop, kind),
                    self._loop.state,
                )
            record = evaluator.run(state)
        if record is None:
            raise_stop(evaluator.ctx.is_canceled)
        return record

    def _evaluator_after_training(self, assembly: Assembly, loop: TrainingLoop, kind: Kind) -> Evaluator:
        object.__setattr__(loop.parts.ctx, "_stop", StopSignal())  # the old request was for training
        evaluator = assembly.make_evaluator(kind, loop.parts.trainer, loop.parts.ctx)
        if evaluator is None:
            raise StartupError(f"there is no {kind} data: give {kind}_data, or `{kind}.dataset` in the job")
        return evaluator


def _build(trainer: TrainerPlugin | type | str) -> TrainerPlugin:
    if isinstance(trainer, str):
        return load_trainer_plugin(trainer)
    built = trainer() if isinstance(trainer, type) else trainer
    check_hooks(built, type(built).__qualname__)
    return built
