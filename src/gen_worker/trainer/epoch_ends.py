"""Where an epoch begins and ends: validation, and what callbacks are told, each once.

Of data with a length, the last step of an epoch is known beforehand. Of other data, the end is found when there is no
next batch; the epoch is closed then, before anything else happens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.callbacks.callback_list import CallbackList
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.schedule import Schedule


@dataclass(slots=True, kw_only=True)
class EpochEnds:
    ctx: StepContext
    schedule: Schedule
    callbacks: CallbackList
    handle: RunHandle
    validate: Callable[[], None]  # one pass, where there is such data
    is_work_due: bool = field(default=False, init=False)  # a checkpoint that is saved meanwhile says so
    _begun: int = field(default=-1, init=False)
    _closed: int = field(default=-1, init=False)

    def begin(self, step: int) -> None:
        """An epoch, where `step` is the last before it."""
        epoch, batch = self.schedule.position(step)
        if batch == 0 and epoch != self._begun:
            self._begun = epoch
            self.callbacks.call("on_epoch_begin", self.handle)

    def close_step(self, step: int) -> None:
        """Validation, and the end of the epoch where this step is known to be its last."""
        self.is_work_due = True
        self.ctx.progress.epoch, batch = self.schedule.position(step)
        if self.schedule.is_validation_due(step):
            self.validate()
        if batch == 0 and self.schedule.is_epoch_end(step):
            self._close()
        self.is_work_due = False

    def end_pass(self, step: int) -> bool:
        """There is no next batch: close the epoch, unless its last step has. False where the run ends with it."""
        if self.schedule.is_one_pass:
            return False
        self.ctx.progress.epoch, _ = self.schedule.position(step)
        if self.ctx.epoch != self._closed:
            self.is_work_due = True
            if self.schedule.job.validate_every == "epoch":
                self.validate()
            self._close()
            self.is_work_due = False
        num_epochs = self.schedule.num_epochs
        return num_epochs is None or self.ctx.epoch < num_epochs

    def end_run(self) -> None:
        """The end of data that does not tell where its epochs end is the end of its only one."""
        if self.schedule.is_one_pass and self._begun >= 0:
            self.callbacks.call("on_epoch_end", self.handle)

    def _close(self) -> None:
        self._closed = self.ctx.epoch
        self.callbacks.call("on_epoch_end", self.handle)
