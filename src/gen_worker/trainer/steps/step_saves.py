"""When the loop saves: cadence, final save, and the save when an attempt ends early. Never an unsound state.

A save that failed counts as not made: its step is saved again when the attempt ends, if the state is sound.
"""

import logging
from collections.abc import Callable
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


class InAuthorsHands:
    """See `StepSaves.in_authors_hands`. Entered with every metric, so not a generator."""

    __slots__ = ("_saves", "_was_sound")

    def __init__(self, saves: "StepSaves") -> None:
        self._saves = saves
        self._was_sound = saves.is_sound

    def __enter__(self) -> None:
        self._saves.is_sound = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._saves.is_sound = self._was_sound


@dataclass(slots=True)
class StepSaves:
    parts: LoopParts
    saver: StateSaver
    schedule: Schedule
    handle: RunHandle
    measurements: Measurements
    journal: WorkJournal
    is_sound: bool = field(default=True, init=False)
    saved_step: int = field(default=-1, init=False)
    final_checkpoint: Path | None = field(default=None, init=False)
    _saved_work: Mark | None = field(default=None, init=False)  # of `saved_step`
    _durable_step: int = field(default=-1, init=False)

    def begin(self, step: int) -> None:
        """`step` is saved already, or nothing was trained yet."""
        self.saved_step = self._durable_step = step
        self._saved_work = self.journal.mark

    def in_authors_hands(self) -> "InAuthorsHands":
        """While the author's code runs. If it raises, it may have left other weights in place: nothing is saved then."""
        return InAuthorsHands(self)

    def save(self, *, final: bool) -> None:
        """Save the present step. Raises the failure of an earlier save, without saving."""
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
        self.keep_shown(step)
        self.take(self.saver.poll)  # a writer without a background is done already

    def keep_shown(self, step: int) -> None:
        """Retention of samples and videos, where that of checkpoints is applied: those of kept checkpoints stay."""
        metric = self.measurements.metric_of(step)
        self.parts.ctx.artifacts.keep(step, metric=metric, saved_step=self.saved_step)

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
        """Report what became durable. Never waits."""
        if self.saver.is_saving:
            self.take(self.saver.poll)

    def wait(self) -> None:
        self.take(self.saver.wait)

    def take(self, ask: Callable[[], list[SavedCheckpoint]]) -> None:
        try:
            saved = ask()
        except TrainStepError:
            self.saved_step, self._saved_work = self._durable_step, None
            raise
        for checkpoint in saved:
            self._durable_step = checkpoint.step
            if checkpoint.final:
                self.final_checkpoint = checkpoint.path
            self.handle.state.checkpoint = checkpoint.summary()
            self.keep_shown(checkpoint.step)
            has_request = self.handle.has_request
            self.parts.callbacks.call("on_checkpoint", self.handle, checkpoint)
            if self.parts.processes.world_size > 1 and self.handle.has_request and not has_request:
                raise TrainStepError(
                    "a callback requested something in on_checkpoint, which runs in one process only: request it in a"
                    " hook that runs in all processes"
                )

    def rescue(self, cause: BaseException, *, have_all_stopped: bool) -> None:
        """Save the last committed step if the state is sound. A second error becomes a note of the first."""
        is_stop = issubclass(type(cause), TrainingCanceled | TrainingTimeout)
        # A save needs all processes, and a state to be rolled back must not be saved.
        is_possible = self.parts.processes.world_size == 1 or (is_stop and have_all_stopped)
        is_possible &= self.is_sound and self.handle.rollback is None
        try:
            self.wait()
        except BaseException as second:  # the caller must see `cause`
            _note_second(cause, "the save in progress failed", second)
        try:
            if is_possible and self._has_news:
                self.save(final=False)
                self.wait()
            if is_stop and self.saved_step > 0:
                add_note(cause, f"saved at step {self.saved_step}: {self.parts.resume_hint} from there")
        except BaseException as second:
            _note_second(cause, "the last step could not be saved", second)

    @property
    def _has_news(self) -> bool:
        step = self.handle.ctx.step
        return step > self.saved_step or (step > 0 and self.journal.mark != self._saved_work)


def _note_second(cause: BaseException, what: str, second: BaseException) -> None:
    logger.error("%s", what, exc_info=second)
    add_note(cause, f"and {what}: {say(second)}")
