"""What is due at which step, and the position of a step in the data. Pure arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.steps.batch_source import BatchSource

LOOK_EVERY_STEPS = 1024  # where nothing is ever due


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts or resumes.

    `is_sample_due`, `is_work_due`: the checkpoint was saved before the sample, or the other work after its step, was done.
    `work`: how far that work was.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    is_sample_due: bool = False
    is_work_due: bool = False
    work: Mapping[str, Any] | None = None


FROM_THE_BEGINNING = Start()


@dataclass(slots=True, kw_only=True)
class Schedule:
    """The job's cadences over the data. `origin`: a step and its position in the data."""

    job: TrainingJobSpec
    source: BatchSource
    origin: Start
    num_epochs: int | None = None
    _per_epoch: int | None = field(init=False)
    _locate: Callable[[int, int], tuple[int, int]] | None = field(init=False)
    _cadences: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        self._per_epoch = self.source.batches_per_epoch
        self._locate = getattr(self.source, "locate", None)
        cadences = [job.metric_every, job.checkpoint_every, job.sample_every]
        if isinstance(job.validate_every, int):
            cadences.append(job.validate_every)
        self._cadences = tuple(sorted({every for every in cadences if every}))

    def end_step(self) -> int | None:
        """The last step; None where only the end of the data decides."""
        ends = [] if self.job.max_steps is None else [self.job.max_steps]
        per_epoch = self._per_epoch
        if self.num_epochs is not None and per_epoch is not None:
            left = (self.num_epochs - self.origin.epoch) * per_epoch - self.origin.batch
            ends.append(self.origin.step + max(left, 0))
        elif self.num_epochs is not None and self.origin.epoch >= self.num_epochs:
            ends.append(self.origin.step)
        return min(ends, default=None)

    def planned_steps(self) -> int | None:
        """The steps of the whole run; None where only the end of the data decides."""
        ends = [] if self.job.max_steps is None else [self.job.max_steps]
        if self.num_epochs is not None and self._per_epoch is not None:
            ends.append(self.num_epochs * self._per_epoch)
        return min(ends, default=None)

    def next_due(self, step: int, end: int | None) -> int:
        """The first step after `step` at which something is due."""
        due = step + LOOK_EVERY_STEPS if end is None else end
        for every in self._cadences:
            at = step - step % every + every
            due = min(due, at)
        if self._per_epoch is not None:
            _, batch = self.position(step)
            due = min(due, step + self._per_epoch - batch)
        return due

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, batch) of the cursor once `step` is committed."""
        epoch, batch = self.origin.epoch, self.origin.batch + step - self.origin.step
        per_epoch = self._per_epoch
        if per_epoch is None:
            # Data of unknown length can locate an epoch once it has seen its end.
            return self._locate(epoch, batch) if self._locate else (epoch, batch)
        return epoch + batch // per_epoch, batch % per_epoch

    @property
    def is_one_pass(self) -> bool:
        """Data without epochs: its end is the end of the run."""
        return self._per_epoch is None and self._locate is None

    def is_epoch_end(self, step: int) -> bool:
        return not self.is_one_pass and self.position(step)[1] == 0

    def is_validation_due(self, step: int) -> bool:
        every = self.job.validate_every
        return self.is_epoch_end(step) if every == "epoch" else is_due(every, step)

    def rows_at(self, step: int) -> int | None:
        """Rows of the first `step` steps; None where batches have no rows."""
        epoch, batch = self.position(step)
        return self.source.rows_before(epoch=epoch, batch=batch)


def is_due(every: int, step: int) -> bool:
    """A cadence of 0 is off."""
    return every > 0 and step % every == 0


def say_end(job: TrainingJobSpec, step: int, end: int | None) -> str:
    """Where training ends that begins at `step`, and that it reports nothing until there."""
    if end is None:
        return "the end of the data"
    every = 1 if job.fast_dev_run else job.metric_every
    is_silent = every > 0 and step // every == end // every
    return f"{end}; metric_every is {every}: no training metrics" if is_silent else str(end)
