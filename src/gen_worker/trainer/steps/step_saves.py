"""The checkpoints of a loop: what of it is saved, whether it may be, and what is saved where an attempt ends early.

A save that was lost counts as never made: the step it was of is saved again on the way out, if the state is sound.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen_worker.errors import TrainingCanceled, TrainingTimeout, TrainStepError
from gen_worker.trainer.artifacts import SavedCheckpoint
from gen_worker.trainer.attempt.failure import add_note, say
from gen_worker.trainer.callbacks.base import RunHandle
from gen_worker.trainer.steps.loop_parts import LoopParts
from gen_worker.trainer.steps.measurements import Measurements
from gen_worker.trainer.steps.saving import StateSaver
from gen_worker.trainer.steps.schedule import Schedule, is_due
from gen_worker.trainer.steps.work_journal import Mark, WorkJournal

logger = logging.getLogger("gen_worker.loop")


@dataclass(slots=True)
class StepSaves:
    parts: LoopParts
    saver: StateSaver
    schedule: Schedule
    handle: RunHandle
    measurements: Measurements
    journal: WorkJournal  # of the work after the present step
    is_sound: bool = field(default=True, init=False)
    saved_step: int = field(default=-1, init=False)
    final_checkpoint: Path | None = field(default=None, init=False)
    _saved_work: Mark | None = field(default=None, init=False)  # how far the work of that step was
    _durable_step: int = field(default=-1, init=False)

    def begin(self, step: int) -> None:
        """What is at `step` now is saved already, or nothing was trained yet."""
        self.saved_step = self._durable_step = step
        self._saved_work = self.journal.mark

    @contextlib.contextmanager
    def in_authors_hands(self) -> Iterator[None]:
        """A hook may swap weights in, fail, and leave them there: what it leaves behind must not be saved."""
        sound, self.is_sound = self.is_sound, False
        yield
        self.is_sound = sound

    def save(self, *, final: bool) -> None:
        """The present step. Where an earlier save was lost, it raises that, with this one still to be made."""
        step = self.handle.ctx.step
        epoch, batch = self.schedule.position(step)
        if self.saver.is_saving:
            self.take(self.saver.wait)
        with self.in_authors_hands():
            self.saver.save(
                self.handle.model_state,
                step=step,
                epoch=epoch,
                final=final,
                cursor=self.parts.source.state(epoch=epoch, batch=batch),
                loop=self._loop_state(step, final=final),
                metric=self.measurements.metric_of(step),
            )
        self.saved_step, self._saved_work = step, self.journal.mark
        self.take(self.saver.poll)  # a writer that does not save in the background is done already

    def _loop_state(self, step: int, *, final: bool) -> dict[str, Any]:
        return {
            "version": 1,
            "is_sample_due": not final and is_due(self.handle.job.sample_every, step),
            "is_work_due": not final and self.journal.is_open,
            "work": None if final else self.journal.to_saved(),
            "trainer_state": self.handle.state.to_saved(),
            "callbacks": self.parts.callbacks.state_dict(),
            **self.parts.restorer.saved_facts(),
        }

    def poll(self) -> None:
        """Take what became durable meanwhile. Never waits; costs nothing where no save is in flight."""
        if self.saver.is_saving:
            self.take(self.saver.poll)

    def wait(self) -> None:
        self.take(self.saver.wait)

    def take(self, ask: Callable[[], list[SavedCheckpoint]]) -> None:
        try:
            saved = ask()
        except TrainStepError:
            self.saved_step, self._saved_work = self._durable_step, None  # the one in flight is lost
            raise
        for checkpoint in saved:
            self._durable_step = checkpoint.step
            if checkpoint.final:
                self.final_checkpoint = checkpoint.path
            self.handle.state.checkpoint = checkpoint.summary()
            has_asked = self.handle.has_asked
            self.parts.callbacks.call("on_checkpoint", self.handle, checkpoint)
            if self.parts.processes.world_size > 1 and self.handle.has_asked and not has_asked:
                raise TrainStepError(
                    "a callback asked for something in on_checkpoint, which is called in one process only: ask in a hook"
                    " that all processes call"
                )

    def rescue(self, cause: BaseException, *, have_all_stopped: bool) -> None:
        """Save the last committed step if the state is sound; never let a second fault hide the first."""
        is_stop = issubclass(type(cause), TrainingCanceled | TrainingTimeout)
        # A save needs all processes; where one failed, the others are not there to take part. And what is to be rolled
        # back is not to be saved.
        is_possible = self.parts.processes.world_size == 1 or (is_stop and have_all_stopped)
        is_possible &= self.is_sound and self.handle.rollback is None
        try:
            self.wait()
        except BaseException as second:  # the cause is on its way up and must arrive
            _note_second(cause, "the save in flight failed", second)
        try:
            if is_possible and self._has_news:
                self.save(final=False)
                self.wait()
            if is_stop and self.saved_step > 0:
                add_note(cause, f"saved at step {self.saved_step}: {self.parts.resume_hint} from there")
        except BaseException as second:
            _note_second(cause, "no checkpoint could be saved on the way out", second)

    @property
    def _has_news(self) -> bool:
        step = self.handle.ctx.step
        return step > self.saved_step or (step > 0 and self.journal.mark != self._saved_work)


def _note_second(cause: BaseException, what: str, second: BaseException) -> None:
    logger.error("%s", what, exc_info=second)
    add_note(cause, f"and {what}: {say(second)}")
