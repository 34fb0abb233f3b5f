"""The training loop. It receives its parts and does no I/O of its own.

Each step: cancel check, `prepare_batch`, `train_step`, step committed (only now the data cursor moves). Then what is due:
metrics, validation, early stopping and the end of an epoch (`step_work`), checkpoint, sample. At the end a test and the
final checkpoint. If the loop ends early, the last committed step is saved if the state is sound.

The next step at which something is due is known beforehand. Up to it, `_advance` does only the cancel check and the
author's two calls. Callbacks that see every batch have a loop of their own.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.errors import InputError, TrainStepError
from gen_worker.trainer.attempt.failure import add_note, say
from gen_worker.trainer.author.author_state import fill_state
from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.contracts import StepControlHints, StepResult
from gen_worker.trainer.job_lifecycle import pause, raise_stop
from gen_worker.trainer.processes.empty_shares import EmptyShareWatch
from gen_worker.trainer.steps.evaluation import Evaluator
from gen_worker.trainer.steps.loop_parts import LoopParts
from gen_worker.trainer.steps.measurements import Measurements, not_a_result
from gen_worker.trainer.steps.sampling import Sampler
from gen_worker.trainer.steps.saving import StateSaver
from gen_worker.trainer.steps.schedule import FROM_THE_BEGINNING, Schedule, Start, is_due
from gen_worker.trainer.steps.step_saves import StepSaves
from gen_worker.trainer.steps.step_work import StepWork
from gen_worker.trainer.steps.work_journal import Part, WorkJournal


@dataclass(slots=True, kw_only=True, repr=False)
class TrainingLoop:
    """Of one attempt."""

    parts: LoopParts
    state: Any = None  # the author's
    start: Start = FROM_THE_BEGINNING
    num_epochs: int | None = None
    step_hooks: EmptyShareWatch | None = None  # replaces the class's `prepare_batch` and `train_step`

    attempted_step: int = field(default=0, init=False)  # the step that failed
    stop_step: int | None = field(default=None, init=False)  # at which all processes stop, once agreed
    _handle: RunHandle = field(init=False)
    _schedule: Schedule = field(init=False)
    _sampler: Sampler = field(init=False)
    _saves: StepSaves = field(init=False)
    _last: StepResult = field(default_factory=StepResult, init=False)
    _last_batch: Any = field(default=None, init=False)
    _work: StepWork = field(init=False)
    _has_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        parts, state = self.parts, self.parts.trainer_state
        schedule = Schedule(job=parts.job, source=parts.source, origin=self.start, num_epochs=self.num_epochs)
        state.attach(parts.ctx, rows_at=schedule.rows_at, callbacks=parts.callbacks.state_dict)
        handle = RunHandle(
            job=parts.ctx.job,
            ctx=parts.ctx,
            trainer=parts.trainer,
            state=state,
            model_state=None,
            folder=parts.folder,
            steps_per_epoch=parts.source.batches_per_epoch,
            write_log=lambda message, level: parts.reporter.log(message, level=level),  # type: ignore[arg-type]
            is_any_process=parts.processes.any_of,
        )
        measurements, journal = Measurements(parts), WorkJournal(parts.callbacks)
        self._schedule, self._handle, self._sampler = schedule, handle, Sampler(parts)
        self._saves = StepSaves(parts, StateSaver(parts), schedule, handle, measurements, journal)
        self._work = StepWork(parts, schedule, handle, measurements, journal, self._saves.in_authors_hands)
        handle.emit = self._work.emit

    @property
    def final_checkpoint(self) -> Path | None:
        """Once it is durable; of an earlier attempt where the run was finished."""
        return self._saves.final_checkpoint

    @final_checkpoint.setter
    def final_checkpoint(self, path: Path | None) -> None:
        self._saves.final_checkpoint = path

    def run(self) -> int:
        """Train to the end and save; returns the step reached. Raises the root cause of an early end."""
        progress = self.parts.ctx.progress
        self._restore_work()
        progress.step, progress.epoch = self.start.step, self.start.epoch
        self._handle.model_state, self._handle.end_step = self.state, self.end_step()
        try:
            self.parts.callbacks.call("on_train_begin", self._handle)
            self._finish_step_of_start()
            self._train()
            if self.parts.test is not None:
                self._test(self.parts.test)
            self._saves.save(final=True)
            self._saves.wait()
            self._has_ended = True
            self.parts.callbacks.call("on_train_end", self._handle)
            self.parts.processes.gather(True)  # `completed` only if all processes got here
        except BaseException as cause:
            self._rescue(cause)
            raise
        return progress.step

    def end_step(self) -> int | None:
        """The last step; None where only the end of the data decides."""
        return self._schedule.end_step()

    def _restore_work(self) -> None:
        start, journal = self.start, self._work.journal
        if start.work is not None:
            journal.restore(start.step, start.work)
        elif start.is_work_due:  # of an older release
            journal.open(start.step, Part.VALIDATION)
        self._saves.begin(start.step)

    def _finish_step_of_start(self) -> None:
        """The work after the resumed step that the interrupted attempt did not finish."""
        start = self.start
        if start.is_work_due:
            self._work.finish(start.step)
        if start.is_sample_due and not self.parts.processes.from_main(self._sampler.has_sample(start.step)):
            self._sample(start.step)

    def _train(self) -> None:
        step, end = self.start.step, self.end_step()
        if (end is not None and step >= end) or self.parts.trainer_state.stop_reason is not None:
            return  # the last attempt stopped before its final checkpoint
        advance = self._advance_with_batch_hooks if self.parts.callbacks.has_batch_hooks else self._advance
        batches = self.parts.source.batches(epoch=self.start.epoch, batch=self.start.batch)
        is_without_batches = True
        try:
            while (end is None or step < end) and self.parts.trainer_state.stop_reason is None:
                self._work.begin_epoch(step)
                if self._handle.has_request:
                    step, end = self._do_requests(step)
                    continue
                # While a save is in progress, its failure must reach the loop at the next step.
                is_watched = self._saves.saver.is_saving or self.parts.restorer.reads.is_open
                until = step + 1 if is_watched else self._schedule.next_due(step, end)
                reached = advance(step, until, batches.__next__)
                if reached == step:  # no batch is left
                    is_without_batches &= self._schedule.is_one_pass  # else an epoch ended
                    if self._handle.has_request or not self._work.end_pass(step):
                        break
                    batches = self.parts.source.batches(epoch=self.parts.ctx.epoch)
                    continue
                is_without_batches = False
                step = reached
                if self.parts.restorer.reads.is_open:
                    with self._saves.in_authors_hands():  # if it raises, one step is not worth a checkpoint
                        self.parts.restorer.report_unread(self.parts.reporter, self.parts.processes)
                if self._handle.rollback is None:
                    self._after(step)
                if self._handle.has_request:
                    step, end = self._do_requests(step)
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if is_without_batches and self.parts.trainer_state.stop_reason is None:
            raise InputError(f"the data gave no batch at epoch {self.start.epoch}, batch {self.start.batch}")
        self._work.end_run()

    def _advance(self, step: int, until: int, next_batch: Any) -> int:
        """The hot path: steps up to `until`. No clock, no allocation, no call of ours."""
        state, ctx = self.state, self.parts.ctx
        stop, progress = ctx.is_canceled, ctx.progress
        hooks = self.step_hooks or self.parts.trainer
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
        """`_advance` with batch hooks; returns early when a callback requests something.

        The hooks are part of the step: if one raises, a resume repeats the step.
        """
        state, ctx, handle = self.state, self.parts.ctx, self._handle
        stop, progress = ctx.is_canceled, ctx.progress
        hooks = self.step_hooks or self.parts.trainer
        prepare_batch, train_step = hooks.prepare_batch, hooks.train_step
        begin = self.parts.callbacks.function("on_batch_begin")
        end = self.parts.callbacks.function("on_batch_end")
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
            if handle.has_request:
                break
        return step

    def _control_of(self, result: Any) -> StepControlHints | None:
        """Of a result without `control`; it must have `metrics`."""
        self._saves.is_sound = hasattr(result, "metrics")
        if not self._saves.is_sound:
            raise not_a_result(result)
        return None

    def _must_stop(self, step: int) -> bool:
        """On a stop request: one process stops now, several at a step that all can reach."""
        if self.stop_step is None:
            self.stop_step = self.parts.processes.stop_step(
                self.parts.ctx.is_canceled, self.parts.ctx.progress
            )
        return step >= self.stop_step

    def _after(self, step: int) -> None:
        """What is due once `step` is committed, in the published order."""
        job = self.parts.job
        self._work.do(step, self._last, self._last_batch)
        if self._handle.rollback is not None:
            return  # the state is about to be rolled back
        self._saves.poll()  # last: the failure of an earlier save must not cost this step its work
        if self._handle.is_checkpoint_due or is_due(job.checkpoint_every, step):
            self._handle.is_checkpoint_due = False
            self._saves.save(final=False)
        if is_due(job.sample_every, step):
            self._sample(step)

    def _do_requests(self, step: int) -> tuple[int, int | None]:
        """Do what callbacks requested. Returns (the present step, the last step)."""
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
        """Saves first: a test that fails must not lose what was trained."""
        if self.parts.ctx.step > self._saves.saved_step:
            self._saves.save(final=False)
        self._work.test(evaluator)

    def _roll_back(self) -> int:
        """Restore an earlier state that a callback asked for. The data continues from its present position."""
        asked = self._handle.rollback
        assert asked is not None
        self._saves.wait()
        payload, step = asked
        checkpoint = None if payload is not None else self.parts.load_checkpoint()
        if payload is None and checkpoint is None:
            raise TrainStepError(
                f"step {self.parts.ctx.step} cannot be rolled back: there is no checkpoint. Set checkpoint_every,"
                " or use a guard that skips or stops"
            )
        epoch, batch = self._schedule.position(self.parts.ctx.step)
        with self._saves.in_authors_hands():
            if checkpoint is None:
                fill_state(self.parts.trainer, self.state, self.parts.ctx, payload=payload)
            else:
                step = checkpoint.step
                self.parts.restorer.fill(self.state, checkpoint)
        place = {"step": step, "epoch": epoch, "batch": batch}
        self.parts.reporter.log(
            f"rolled back from step {self.parts.ctx.step} to step {step}", level="warning", **place
        )
        self._schedule.origin = Start(step=step, epoch=epoch, batch=batch)
        self.parts.ctx.progress.step, self.parts.ctx.progress.epoch = step, epoch
        self._saves.saved_step = min(self._saves.saved_step, step)
        self._handle.rollback = None
        if batch == 0 and self.parts.source.batches_per_epoch is not None:
            self._work.end_epoch(step)
        return step

    def _sample(self, step: int) -> None:
        with self._saves.in_authors_hands():
            self._sampler.sample(self.state, step)
        self._saves.keep_shown(step)

    def _rescue(self, cause: BaseException) -> None:
        self._saves.rescue(cause, have_all_stopped=self.stop_step is not None)
        faults = [] if self._has_ended else self.parts.callbacks.call_all("on_exception", self._handle, cause)
        for fault in faults:
            add_note(cause, f"and the on_exception hook of a callback failed: {say(fault)}")
