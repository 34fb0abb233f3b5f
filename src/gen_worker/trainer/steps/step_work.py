"""The work between a step and its checkpoint: metrics, validation, the end and begin of epochs.

Each part is done once, even if the attempt is interrupted: the `WorkJournal` records how far it was. The metrics of the
step are read first: if that fails, the step is not sound. The end of data of unknown length is found when there is no
next batch; its epoch is closed then.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.contracts import StepResult
from gen_worker.trainer.job_lifecycle import raise_stop
from gen_worker.trainer.steps.evaluation import Evaluator, count_rows
from gen_worker.trainer.steps.loop_parts import LoopParts
from gen_worker.trainer.steps.measurements import Measurements, read_metrics
from gen_worker.trainer.steps.schedule import Schedule, is_due
from gen_worker.trainer.steps.work_journal import Part, WorkJournal


@dataclass(slots=True)
class StepWork:
    parts: LoopParts
    schedule: Schedule
    handle: RunHandle
    measurements: Measurements
    journal: WorkJournal
    in_authors_hands: Callable[[], AbstractContextManager[None]]  # see `StepSaves`
    _begun: int = field(default=-1, init=False)
    _closed: int = field(default=-1, init=False)

    def do(self, step: int, result: StepResult, batch: Any) -> None:
        """All work of a step that was just committed."""
        journal = self.journal
        journal.open(step)
        if is_due(self.schedule.job.metric_every, step):
            with self.in_authors_hands():  # reading a tensor may raise an error of the step
                journal.values = self._read(result, batch)
            self.parts.restorer.watch_rate(journal.values, self.handle.end_step, self.parts.reporter)
        self._do(step)

    def finish(self, step: int) -> None:
        """The work that an interrupted attempt has not done."""
        if self.journal.has_left(Part.ON_EPOCH_END):
            self._do(step)

    def _do(self, step: int) -> None:
        journal, schedule = self.journal, self.schedule
        if values := journal.values:
            journal.do(Part.METRICS, lambda: self.measurements.take(values))
            journal.call(Part.ON_METRICS, "on_metrics", self.handle, values)
        self.parts.ctx.progress.epoch, batch = schedule.position(step)
        if schedule.is_validation_due(step):
            self._validate()
        if batch == 0 and schedule.is_epoch_end(step):
            self._end_epoch()
        journal.close()

    def _read(self, result: StepResult, batch: Any) -> Mapping[str, float]:
        is_quiet = getattr(getattr(result, "control", None), "skip_cadence_emit", False)
        values = {} if is_quiet else read_metrics(result, self.parts.ctx.optimizer, self.handle.model_state)
        if self.parts.processes.world_size > 1:
            values = self.parts.processes.mean(values, weight=count_rows(batch))
        return values

    def emit(self, values: Mapping[str, float]) -> None:
        """Report metrics of a callback."""
        self.measurements.take(values)
        self.parts.callbacks.call("on_metrics", self.handle, values)

    def _validate(self) -> None:
        journal, evaluator = self.journal, self.parts.validation
        if evaluator is None:
            return
        wraps = self.parts.callbacks.wraps_validation
        # A callback that swaps weights for a validation restores them in `on_validation_end`.
        with self.in_authors_hands() if wraps else nullcontext():
            journal.do(Part.VALIDATION, lambda: self._evaluate(evaluator, may_leave=not wraps))
            record = journal.record
            assert record is not None
            journal.do(Part.VALIDATED, lambda: self.measurements.take_evaluation(record))
            journal.call(Part.ON_VALIDATION_END, "on_validation_end", self.handle, record)
        journal.call(Part.ON_VALIDATION_METRICS, "on_metrics", self.handle, record.metrics)

    def _evaluate(self, evaluator: Evaluator, *, may_leave: bool) -> None:
        if evaluator.kind == "validation":
            self.parts.callbacks.call("on_validation_begin", self.handle)
        with self.in_authors_hands():
            record = evaluator.run(self.handle.model_state, may_leave=may_leave)
        if record is None:
            raise_stop(self.parts.ctx.is_canceled)
        self.journal.record = record

    def test(self, evaluator: Evaluator) -> None:
        """After the last step."""
        journal = self.journal
        journal.open(self.parts.ctx.step, Part.TEST)
        journal.do(Part.TEST, lambda: self._evaluate(evaluator, may_leave=True))
        record = journal.record
        assert record is not None
        journal.do(Part.TESTED, lambda: self.measurements.take_evaluation(record))
        journal.call(Part.ON_TEST_METRICS, "on_metrics", self.handle, record.metrics)

    def begin_epoch(self, step: int) -> None:
        """If `step` is the last one before an epoch."""
        epoch, batch = self.schedule.position(step)
        if batch == 0 and epoch != self._begun:
            self._begun = epoch
            self.journal.open(step, Part.ON_EPOCH_BEGIN)
            self.journal.call(Part.ON_EPOCH_BEGIN, "on_epoch_begin", self.handle)
            self.journal.close()

    def end_pass(self, step: int) -> bool:
        """There is no next batch: close the epoch, unless it is closed. False where the run ends with it."""
        schedule = self.schedule
        if schedule.is_one_pass:
            return False
        self.parts.ctx.progress.epoch, _ = schedule.position(step)
        if self.parts.ctx.epoch != self._closed:
            is_validated = schedule.job.validate_every == "epoch"
            self.journal.open(step, Part.VALIDATION if is_validated else Part.ON_EPOCH_END)
            if is_validated:
                self._validate()
            self._end_epoch()
            self.journal.close()
        num_epochs = schedule.num_epochs
        return num_epochs is None or self.parts.ctx.epoch < num_epochs

    def end_epoch(self, step: int) -> None:
        """After a rollback to the end of an epoch."""
        self.journal.open(step, Part.ON_EPOCH_END)
        self._end_epoch()
        self.journal.close()

    def end_run(self) -> None:
        """Data without epochs has one, which ends with the run."""
        if self.schedule.is_one_pass and self._begun >= 0:
            self.parts.callbacks.call("on_epoch_end", self.handle)

    def _end_epoch(self) -> None:
        self._closed = self.parts.ctx.epoch
        self.journal.call(Part.ON_EPOCH_END, "on_epoch_end", self.handle)
