"""The loop: drives a trainer class from one step to the last. It receives its parts and does no I/O of its own.

Each step: cancel check, `prepare_batch`, `train_step`, step committed; only then has the data cursor moved. Then what
is due: metrics, validation, early stopping and the end of an epoch, checkpoint, sample. At the end a test and the final
checkpoint. Whatever ends the loop early, the last committed step is saved if the state is sound.

The next step at which anything is due is known beforehand, so between two such steps there is nothing but the
cancel check and the author's two calls (`_advance`). Callbacks that look at every batch have a second such loop.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.errors import InputError, TrainingCanceled, TrainingTimeout, TrainStepError
from gen_worker.trainer.artifacts import SavedCheckpoint
from gen_worker.trainer.author_state import fill_state
from gen_worker.trainer.batch_source import BatchSource
from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import (
    StepContext,
    StepControlHints,
    StepResult,
    TrainerPlugin,
    TrainingJobSpec,
)
from gen_worker.trainer.empty_shares import EmptyShareWatch
from gen_worker.trainer.epoch_ends import EpochEnds
from gen_worker.trainer.evaluation import Evaluator, count_rows
from gen_worker.trainer.job_lifecycle import pause, raise_stop
from gen_worker.trainer.measurements import Measurements
from gen_worker.trainer.parts import LoopArtifactWriter, LoopReporter, LoopUploader
from gen_worker.trainer.processes import OneProcess, Processes
from gen_worker.trainer.sampling import Sampler
from gen_worker.trainer.saving import StateSaver
from gen_worker.trainer.schedule import FROM_THE_BEGINNING, Schedule, Start, is_due
from gen_worker.trainer.state import TrainerState
from gen_worker.trainer.state_restorer import StateRestorer
from gen_worker.trainer.step_metrics import not_a_result, read_metrics

logger = logging.getLogger("gen_worker.loop")


@dataclass(slots=True, kw_only=True, repr=False)
class TrainingLoop:
    """One attempt's way through its steps. Its progress and stop signal are shared with the lifecycle's watcher."""

    job: TrainingJobSpec
    ctx: StepContext
    trainer: TrainerPlugin
    state: Any
    source: BatchSource
    reporter: LoopReporter
    artifacts: LoopArtifactWriter | None  # in the main process
    uploader: LoopUploader | None = None
    start: Start = FROM_THE_BEGINNING
    num_epochs: int | None = None
    callbacks: CallbackList = field(default_factory=CallbackList)
    validation: Evaluator | None = None
    test: Evaluator | None = None
    restorer: StateRestorer
    processes: Processes = field(default_factory=OneProcess)
    step_hooks: EmptyShareWatch | None = None  # what is called instead of the class's own two hooks of a step
    trainer_state: TrainerState = field(default_factory=TrainerState)
    folder: Path = Path()  # of the run's artifacts, for callbacks
    how_to_go_on: str = "run the job again to go on"
    load_checkpoint: Callable[[], Checkpoint | None] = lambda: None

    final_checkpoint: Path | None = field(default=None, init=False)
    attempted_step: int = field(default=0, init=False)  # the one that failed, where one did
    stop_step: int | None = field(default=None, init=False)  # at which all processes stop, once settled
    _handle: RunHandle = field(init=False)
    _saver: StateSaver = field(init=False)
    _schedule: Schedule = field(init=False)
    _sampler: Sampler = field(init=False)
    _measurements: Measurements = field(init=False)
    _is_sound: bool = field(default=True, init=False)
    _last: StepResult = field(default_factory=StepResult, init=False)
    _last_batch: Any = field(default=None, init=False)
    _saved_step: int = field(default=-1, init=False)
    _epochs: EpochEnds = field(init=False)
    _has_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._schedule = Schedule(
            job=self.job, source=self.source, origin=self.start, num_epochs=self.num_epochs
        )
        state = self.trainer_state
        state.attach(self.ctx, rows_at=self._schedule.rows_at, callbacks=self.callbacks.state_dict)
        self._saver = StateSaver(
            ctx=self.ctx,
            trainer=self.trainer,
            reporter=self.reporter,
            artifacts=self.artifacts,
            processes=self.processes,
            identity=self.restorer.identity,
            uploader=self.uploader,
        )
        self._measurements = Measurements(
            ctx=self.ctx,
            state=state,
            reporter=self.reporter,
            uploader=self.uploader,
            is_validated=self.validation is not None,
        )
        self._sampler = Sampler(
            ctx=self.ctx,
            trainer=self.trainer,
            reporter=self.reporter,
            artifacts=self.artifacts,
            uploader=self.uploader,
        )
        self._handle = RunHandle(
            job=self.ctx.job,
            ctx=self.ctx,
            trainer=self.trainer,
            state=state,
            model_state=None,
            folder=self.folder,
            steps_per_epoch=self.source.batches_per_epoch,
            emit=self._emit,
            tell=lambda message, level: self.reporter.log(message, level=level),  # type: ignore[arg-type]
            any_of_all=self.processes.any_of,
        )
        self._epochs = EpochEnds(
            ctx=self.ctx,
            schedule=self._schedule,
            callbacks=self.callbacks,
            handle=self._handle,
            validate=self._validate,
        )

    def run(self) -> int:
        """Train to the end and save; returns the step reached. Raises the root cause of an early end."""
        progress, self._saved_step = self.ctx.progress, self.start.step
        progress.step, progress.epoch = self.start.step, self.start.epoch
        self._handle.model_state, self._handle.end_step = self.state, self.end_step()
        try:
            self.callbacks.call("on_train_begin", self._handle)
            self._finish_step_of_start()
            self._train()
            if self.test is not None:
                self._test(self.test)
            self._save(final=True)
            self._take_saved(self._saver.wait)
            self._has_ended = True
            self.callbacks.call("on_train_end", self._handle)
            self.processes.gather(True)  # an end that one process did not reach is not reported as one
        except BaseException as cause:
            self._rescue(cause)
            raise
        return progress.step

    def end_step(self) -> int | None:
        """The step at which the run is done; None where only the end of the data can tell."""
        return self._schedule.end_step()

    def _finish_step_of_start(self) -> None:
        """What an interrupted attempt had not done yet of the step at which this one goes on."""
        start = self.start
        if start.is_work_due:
            self._epochs.close_step(start.step)
        if start.is_sample_due and not self.processes.from_main(self._sampler.has_sample(start.step)):
            self._sample(start.step)

    def _train(self) -> None:
        step, end = self.start.step, self.end_step()
        if (end is not None and step >= end) or self.trainer_state.stop_reason is not None:
            return  # stopped between its last step and its final checkpoint
        advance = self._advance_with_batch_hooks if self.callbacks.has_batch_hooks else self._advance
        batches = self.source.batches(epoch=self.start.epoch, batch=self.start.batch)
        is_without_batches = True
        try:
            while (end is None or step < end) and self.trainer_state.stop_reason is None:
                self._epochs.begin(step)
                if self._handle.has_asked:
                    step, end = self._serve(step)
                    continue
                # While a save is in flight, its failure is to reach the loop at the next step.
                is_watched = self._saver.is_saving or self.restorer.reads.is_open
                until = step + 1 if is_watched else self._schedule.next_due(step, end)
                reached = advance(step, until, batches.__next__)
                if reached == step:  # no batch is left
                    is_without_batches &= self._schedule.is_one_pass  # else it is the end of an epoch
                    if self._handle.has_asked or not self._epochs.end_pass(step):
                        break
                    batches = self.source.batches(epoch=self.ctx.epoch)
                    continue
                is_without_batches = False
                step = reached
                if self.restorer.reads.is_open:
                    with self._in_authors_hands():  # where it is an error, one step is not worth a checkpoint
                        self.restorer.tell_unread(self.reporter, self.processes)
                if self._handle.rollback is None:
                    self._after(step)
                if self._handle.has_asked:
                    step, end = self._serve(step)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if is_without_batches and self.trainer_state.stop_reason is None:
            raise InputError(
                f"the data gave no batch at epoch {self.start.epoch}, batch {self.start.batch}: there is nothing to train on"
            )
        self._epochs.end_run()

    def _advance(self, step: int, until: int, next_batch: Any) -> int:
        """The hot path: steps up to `until`, where something is due. No clock, no allocation, no call of ours."""
        state, ctx = self.state, self.ctx
        stop, progress = ctx.is_canceled, ctx.progress
        hooks = self.step_hooks or self.trainer
        prepare_batch, train_step = hooks.prepare_batch, hooks.train_step
        result, raw_batch = self._last, self._last_batch
        while step < until:
            if stop.reason is not None and self._must_stop(step):
                raise_stop(stop)
            try:
                raw_batch = next_batch()
            except StopIteration:
                break
            try:
                result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
                step += 1
                progress.step = step
            except BaseException:
                self._is_sound, self.attempted_step = False, progress.step + 1
                raise
            try:
                control = result.control
            except AttributeError:
                control = self._control_of(result)
            if control is not None:
                pause(ctx.is_canceled, control.backoff_seconds or 0.0)
        self._last, self._last_batch = result, raw_batch
        return step

    def _advance_with_batch_hooks(self, step: int, until: int, next_batch: Any) -> int:
        """`_advance`, for callbacks that look at every batch; ends early where one of them asks for something."""
        state, ctx, handle = self.state, self.ctx, self._handle
        stop, progress = ctx.is_canceled, ctx.progress
        hooks = self.step_hooks or self.trainer
        prepare_batch, train_step = hooks.prepare_batch, hooks.train_step
        begin = self.callbacks.function("on_batch_begin")
        end = self.callbacks.function("on_batch_end")
        while step < until:
            if stop.reason is not None and self._must_stop(step):
                raise_stop(stop)
            try:
                raw_batch = next_batch()
            except StopIteration:
                break
            begin(handle, raw_batch)
            try:
                result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
                step += 1
                progress.step = step
            except BaseException:
                self._is_sound, self.attempted_step = False, progress.step + 1
                raise
            self._last, self._last_batch = result, raw_batch
            try:
                control = result.control
            except AttributeError:
                control = self._control_of(result)
            end(handle, raw_batch, result)
            if control is not None:
                pause(ctx.is_canceled, control.backoff_seconds or 0.0)
            if handle.has_asked:
                break
        return step

    def _control_of(self, result: Any) -> StepControlHints | None:
        """Of a result that has no `control`: anything with `metrics` will do."""
        self._is_sound = hasattr(result, "metrics")
        if not self._is_sound:
            raise not_a_result(result)
        return None

    def _must_stop(self, step: int) -> bool:
        """A stop was asked for: alone, now; with others, at the step that all of them can still reach."""
        if self.stop_step is None:
            self.stop_step = self.processes.stop_step(self.ctx.is_canceled, self.ctx.progress)
        return step >= self.stop_step

    def _after(self, step: int) -> None:
        """What is due once `step` is committed, in the published order."""
        job = self.job
        if self._saver.is_saving:
            self._take_saved(self._saver.poll)
        self._epochs.is_work_due = True
        if is_due(job.metric_every, step):
            self._emit_metrics()
        self._epochs.close_step(step)
        if self._handle.rollback is not None:
            return  # what would be saved is about to be taken back
        if self._handle.is_checkpoint_due or is_due(job.checkpoint_every, step):
            self._handle.is_checkpoint_due = False
            self._save(final=False)
        if is_due(job.sample_every, step):
            self._sample(step)

    def _serve(self, step: int) -> tuple[int, int | None]:
        """What callbacks asked for: (the step to go on from, the last step)."""
        handle = self._handle
        if handle.rollback is not None:
            step = self._roll_back()
            handle.end_step = self.end_step()
        if handle.is_checkpoint_due:
            handle.is_checkpoint_due = False
            if step > self._saved_step:
                self._save(final=False)
        return step, handle.end_step

    def _emit_metrics(self) -> None:
        result = self._last
        is_quiet = getattr(getattr(result, "control", None), "skip_cadence_emit", False)
        values = {} if is_quiet else read_metrics(result, self.ctx.optimizer, self.state)
        if self.processes.world_size > 1:
            values = self.processes.mean(values, weight=count_rows(self._last_batch))
        if values:
            self._emit(values)
        self.restorer.watch_rate(values, self._handle.end_step, self.reporter)

    def _emit(self, values: Mapping[str, float]) -> None:
        self._measurements.take(values)
        self.callbacks.call("on_metrics", self._handle, values)

    def _validate(self) -> None:
        if self.validation is not None:
            self._evaluate(self.validation)

    def _evaluate(self, evaluator: Evaluator) -> None:
        handle, is_validation = self._handle, evaluator.kind == "validation"
        if is_validation:
            self.callbacks.call("on_validation_begin", handle)
        with self._in_authors_hands():
            record = evaluator.run(self.state)
        if record is None:
            raise_stop(self.ctx.is_canceled)
        self._measurements.take_evaluation(record)
        if is_validation:
            self.callbacks.call("on_validation_end", handle, record)
        self.callbacks.call("on_metrics", handle, record.metrics)

    def _test(self, evaluator: Evaluator) -> None:
        """After a save: what was trained is not lost with a test that fails."""
        if self.ctx.step > self._saved_step:
            self._save(final=False)
        self._evaluate(evaluator)

    def _roll_back(self) -> int:
        """Take back what a callback found to be bad: an earlier state, at the data's present place."""
        asked, self._handle.rollback = self._handle.rollback, None
        assert asked is not None
        self._take_saved(self._saver.wait)
        payload, step = asked
        checkpoint = None if payload is not None else self.load_checkpoint()
        if payload is None and checkpoint is None:
            raise TrainStepError(
                f"step {self.ctx.step} was to be rolled back, and there is no checkpoint to go back to:"
                " set checkpoint_every, or use a guard that skips or stops"
            )
        epoch, batch = self._schedule.position(self.ctx.step)
        with self._in_authors_hands():
            if checkpoint is None:
                fill_state(self.trainer, self.state, self.ctx, payload=payload)
            else:
                step = checkpoint.step
                self.restorer.fill(self.state, checkpoint)
        place = {"step": step, "epoch": epoch, "batch": batch}
        self.reporter.log(f"rolled back from step {self.ctx.step} to step {step}", level="warning", **place)
        self._schedule.origin = Start(step=step, epoch=epoch, batch=batch)
        self.ctx.progress.step, self.ctx.progress.epoch = step, epoch
        self._saved_step = min(self._saved_step, step)
        if batch == 0 and self.source.batches_per_epoch is not None:
            self.callbacks.call("on_epoch_end", self._handle)
        return step

    @contextlib.contextmanager
    def _in_authors_hands(self) -> Iterator[None]:
        """A hook may swap weights in, fail, and leave them there: what it leaves behind must not be saved."""
        sound, self._is_sound = self._is_sound, False
        yield
        self._is_sound = sound

    def _save(self, *, final: bool) -> None:
        step = self.ctx.step
        epoch, batch = self._schedule.position(step)
        with self._in_authors_hands():
            self._saver.save(
                self.state,
                step=step,
                epoch=epoch,
                final=final,
                cursor=self.source.state(epoch=epoch, batch=batch),
                loop={
                    "version": 1,
                    "is_sample_due": not final and is_due(self.job.sample_every, step),
                    "is_work_due": not final and self._epochs.is_work_due,
                    "trainer_state": self.trainer_state.to_saved(),
                    "callbacks": self.callbacks.state_dict(),
                    **self.restorer.saved_facts(),
                },
                metric=self._measurements.metric_of(step),
            )
        self._saved_step = step
        self._take_saved(self._saver.poll)  # a writer that does not save in the background is done already

    def _take_saved(self, ask: Callable[[], list[SavedCheckpoint]]) -> None:
        for checkpoint in ask():
            if checkpoint.final:
                self.final_checkpoint = checkpoint.path
            self.trainer_state.checkpoint = checkpoint.summary()
            has_asked = self._handle.has_asked
            self.callbacks.call("on_checkpoint", self._handle, checkpoint)
            if self.processes.world_size > 1 and self._handle.has_asked and not has_asked:
                raise TrainStepError(
                    "a callback asked for something in on_checkpoint, which is called in one process only: ask in a hook"
                    " that all processes call"
                )

    def _sample(self, step: int) -> None:
        with self._in_authors_hands():
            self._sampler.sample(self.state, step)

    def _rescue(self, cause: BaseException) -> None:
        """Save the last committed step if the state is sound; never let a second fault hide the first."""
        is_stop = isinstance(cause, TrainingCanceled | TrainingTimeout)
        try:
            # A save needs all processes; where one failed, the others are not there to take part.
            is_possible = self.processes.world_size == 1 or (is_stop and self.stop_step is not None)
            if self._is_sound and is_possible and self.ctx.step > self._saved_step:
                self._save(final=False)
            self._take_saved(self._saver.wait)
            if is_stop and self._saved_step > 0:
                cause.add_note(f"saved at step {self._saved_step}: {self.how_to_go_on} from there")
        except Exception as second:  # the cause is on its way up and must arrive
            logger.exception("no checkpoint could be saved on the way out")
            cause.add_note(f"and no checkpoint could be saved on the way out: {second}")
        faults = [] if self._has_ended else self.callbacks.call_all("on_exception", self._handle, cause)
        for fault in faults:
            cause.add_note(f"and a callback failed on the way out: {fault}")
