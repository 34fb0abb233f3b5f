"""The loop: drives a trainer class from one step to the last. It receives its parts and does no I/O of its own.

Each step: cancel check, `prepare_batch`, `train_step`, step committed; only then has the data cursor moved. Then what
is due: metrics, validation, early stopping and the end of an epoch (`step_work`), checkpoint, sample. At the end a test
and the final checkpoint. Whatever ends the loop early, the last committed step is saved if the state is sound, with how
far the work after it was.

The next step at which anything is due is known beforehand, so between two such steps there is nothing but the
cancel check and the author's two calls (`_advance`). Callbacks that look at every batch have a second such loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import InputError, TrainStepError
from gen_worker.trainer.attempt.failure import add_note, say
from gen_worker.trainer.attempt.state import TrainerState
from gen_worker.trainer.author.author_state import fill_state
from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StepContext, StepControlHints, StepResult, TrainerPlugin
from gen_worker.trainer.job_lifecycle import pause, raise_stop
from gen_worker.trainer.processes.empty_shares import EmptyShareWatch
from gen_worker.trainer.processes.group import OneProcess, Processes
from gen_worker.trainer.restore.state_restorer import StateRestorer
from gen_worker.trainer.steps.batch_source import BatchSource
from gen_worker.trainer.steps.evaluation import Evaluator
from gen_worker.trainer.steps.measurements import Measurements
from gen_worker.trainer.steps.parts import LoopArtifactWriter, LoopReporter, LoopUploader
from gen_worker.trainer.steps.sampling import Sampler
from gen_worker.trainer.steps.saving import StateSaver
from gen_worker.trainer.steps.schedule import FROM_THE_BEGINNING, Schedule, Start, is_due
from gen_worker.trainer.steps.step_metrics import not_a_result
from gen_worker.trainer.steps.step_saves import StepSaves
from gen_worker.trainer.steps.step_work import StepWork
from gen_worker.trainer.steps.work_journal import Part


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

    attempted_step: int = field(default=0, init=False)  # the one that failed, where one did
    stop_step: int | None = field(default=None, init=False)  # at which all processes stop, once settled
    _handle: RunHandle = field(init=False)
    _schedule: Schedule = field(init=False)
    _sampler: Sampler = field(init=False)
    _saves: StepSaves = field(init=False)
    _last: StepResult = field(default_factory=StepResult, init=False)
    _last_batch: Any = field(default=None, init=False)
    _work: StepWork = field(init=False)
    _has_ended: bool = field(default=False, init=False)

    @property
    def evaluators(self) -> list[Evaluator]:
        return [evaluator for evaluator in (self.validation, self.test) if evaluator is not None]

    def __post_init__(self) -> None:
        self._schedule = Schedule(
            job=self.job, source=self.source, origin=self.start, num_epochs=self.num_epochs
        )
        state = self.trainer_state
        state.attach(self.ctx, rows_at=self._schedule.rows_at, callbacks=self.callbacks.state_dict)
        saver = StateSaver(
            ctx=self.ctx,
            trainer=self.trainer,
            reporter=self.reporter,
            artifacts=self.artifacts,
            processes=self.processes,
            identity=self.restorer.identity,
            uploader=self.uploader,
            held_out=self.evaluators,
        )
        measurements = Measurements(
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
            tell=lambda message, level: self.reporter.log(message, level=level),  # type: ignore[arg-type]
            any_of_all=self.processes.any_of,
        )
        self._saves = StepSaves(
            saver=saver,
            schedule=self._schedule,
            source=self.source,
            callbacks=self.callbacks,
            handle=self._handle,
            measurements=measurements,
            processes=self.processes,
            restorer=self.restorer,
            how_to_go_on=self.how_to_go_on,
        )
        self._work = StepWork(
            ctx=self.ctx,
            schedule=self._schedule,
            callbacks=self.callbacks,
            handle=self._handle,
            measurements=measurements,
            reporter=self.reporter,
            processes=self.processes,
            restorer=self.restorer,
            validation=self.validation,
            in_authors_hands=self._saves.in_authors_hands,
        )
        self._saves.journal = self._work.journal
        self._handle.emit = self._work.emit

    @property
    def final_checkpoint(self) -> Path | None:
        """Once it is durable; or that of an earlier attempt, where there is nothing left to do."""
        return self._saves.final_checkpoint

    @final_checkpoint.setter
    def final_checkpoint(self, path: Path | None) -> None:
        self._saves.final_checkpoint = path

    def run(self) -> int:
        """Train to the end and save; returns the step reached. Raises the root cause of an early end."""
        progress = self.ctx.progress
        self._restore_work()
        progress.step, progress.epoch = self.start.step, self.start.epoch
        self._handle.model_state, self._handle.end_step = self.state, self.end_step()
        try:
            self.callbacks.call("on_train_begin", self._handle)
            self._finish_step_of_start()
            self._train()
            if self.test is not None:
                self._test(self.test)
            self._saves.save(final=True)
            self._saves.wait()
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

    def _restore_work(self) -> None:
        start, journal = self.start, self._work.journal
        if start.work is not None:
            journal.restore(start.step, start.work)
        elif start.is_work_due:  # as older releases told it
            journal.open(start.step, Part.VALIDATION)
        self._saves.begin(start.step)

    def _finish_step_of_start(self) -> None:
        """What an interrupted attempt had not done yet of the step at which this one goes on."""
        start = self.start
        if start.is_work_due:
            self._work.finish(start.step)
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
                self._work.begin_epoch(step)
                if self._handle.has_asked:
                    step, end = self._serve(step)
                    continue
                # While a save is in flight, its failure is to reach the loop at the next step.
                is_watched = self._saves.saver.is_saving or self.restorer.reads.is_open
                until = step + 1 if is_watched else self._schedule.next_due(step, end)
                reached = advance(step, until, batches.__next__)
                if reached == step:  # no batch is left
                    is_without_batches &= self._schedule.is_one_pass  # else it is the end of an epoch
                    if self._handle.has_asked or not self._work.end_pass(step):
                        break
                    batches = self.source.batches(epoch=self.ctx.epoch)
                    continue
                is_without_batches = False
                step = reached
                if self.restorer.reads.is_open:
                    with (
                        self._saves.in_authors_hands()
                    ):  # where it is an error, one step is not worth a checkpoint
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
        self._work.end_run()

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
                self._saves.is_sound, self.attempted_step = False, progress.step + 1
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
        """`_advance`, for callbacks that look at every batch; ends early where one of them asks for something.

        Their hooks belong to the step: a resume has no batch to call them with, so a step in which one raises is made
        again.
        """
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
            try:
                begin(handle, raw_batch)
                result = train_step(prepare_batch(raw_batch, state, ctx), state, ctx)
                step += 1
                progress.step = step
                self._last, self._last_batch = result, raw_batch
                try:
                    control = result.control
                except AttributeError:
                    control = self._control_of(result)
                end(handle, raw_batch, result)
            except BaseException:
                self._saves.is_sound, self.attempted_step = False, max(progress.step, step + 1)
                raise
            if control is not None:
                pause(ctx.is_canceled, control.backoff_seconds or 0.0)
            if handle.has_asked:
                break
        return step

    def _control_of(self, result: Any) -> StepControlHints | None:
        """Of a result that has no `control`: anything with `metrics` will do."""
        self._saves.is_sound = hasattr(result, "metrics")
        if not self._saves.is_sound:
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
        self._work.do(step, self._last, self._last_batch)
        if self._handle.rollback is not None:
            return  # what would be saved is about to be taken back
        self._saves.poll()  # after all this: the failure of an earlier save is not to cost this step anything
        if self._handle.is_checkpoint_due or is_due(job.checkpoint_every, step):
            self._handle.is_checkpoint_due = False
            self._saves.save(final=False)
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
            if step > self._saves.saved_step:
                self._saves.save(final=False)
        return step, handle.end_step

    def _test(self, evaluator: Evaluator) -> None:
        """After a save: what was trained is not lost with a test that fails."""
        if self.ctx.step > self._saves.saved_step:
            self._saves.save(final=False)
        self._work.test(evaluator)

    def _roll_back(self) -> int:
        """Take back what a callback found to be bad: an earlier state, at the data's present place."""
        asked = self._handle.rollback
        assert asked is not None
        self._saves.wait()
        payload, step = asked
        checkpoint = None if payload is not None else self.load_checkpoint()
        if payload is None and checkpoint is None:
            raise TrainStepError(
                f"step {self.ctx.step} was to be rolled back, and there is no checkpoint to go back to:"
                " set checkpoint_every, or use a guard that skips or stops"
            )
        epoch, batch = self._schedule.position(self.ctx.step)
        with self._saves.in_authors_hands():
            if checkpoint is None:
                fill_state(self.trainer, self.state, self.ctx, payload=payload)
            else:
                step = checkpoint.step
                self.restorer.fill(self.state, checkpoint)
        place = {"step": step, "epoch": epoch, "batch": batch}
        self.reporter.log(f"rolled back from step {self.ctx.step} to step {step}", level="warning", **place)
        self._schedule.origin = Start(step=step, epoch=epoch, batch=batch)
        self.ctx.progress.step, self.ctx.progress.epoch = step, epoch
        self._saves.saved_step = min(self._saves.saved_step, step)
        self._handle.rollback = None
        if batch == 0 and self.source.batches_per_epoch is not None:
            self._work.end_epoch(step)
        return step

    def _sample(self, step: int) -> None:
        with self._saves.in_authors_hands():
            self._sampler.sample(self.state, step)

    def _rescue(self, cause: BaseException) -> None:
        self._saves.rescue(cause, have_all_stopped=self.stop_step is not None)
        faults = [] if self._has_ended else self.callbacks.call_all("on_exception", self._handle, cause)
        for fault in faults:
            add_note(cause, f"and a callback failed on the way out: {say(fault)}")
