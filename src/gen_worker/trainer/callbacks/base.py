"""Callbacks: hooks at fixed points of training, in a fixed order.

    on_train_begin
    ├── on_epoch_begin                     before the first batch of an epoch
    │   ├── on_batch_begin                 before `prepare_batch`
    │   ├── on_batch_end                   the step is committed
    │   ├── on_metrics                     the step's metrics were emitted
    │   ├── on_validation_begin
    │   ├── on_validation_end              then on_metrics with the val/ values
    │   └── on_epoch_end                   before the checkpoint of the same step, which saves its effects
    ├── on_checkpoint                      a checkpoint is durable and verified
    └── on_train_end | on_exception        exactly one of the two, last

At each point callbacks are called in the order in which they were given. See `docs/callbacks.md`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.screen_repr import screen_repr
from gen_worker.trainer.attempt.state import MetricsRecord, TrainerState
from gen_worker.trainer.contracts import StepContext, StepResult, TrainerPlugin

if TYPE_CHECKING:
    from gen_worker.trainer.artifacts import SavedCheckpoint

logger = logging.getLogger("gen_worker.callbacks")


@dataclass(slots=True, kw_only=True, repr=False)
class RunHandle:
    """What a callback may read and request. The same object during a whole attempt."""

    job: TrainingJobSpec
    ctx: StepContext
    trainer: TrainerPlugin
    state: TrainerState
    model_state: Any  # what the author's `configure` returned
    folder: Path  # of the run's artifacts; loggers write below it
    end_step: int | None = None
    steps_per_epoch: int | None = None

    # Set by the loop. Callbacks use the methods below.
    emit: Callable[[Mapping[str, float]], None] = lambda _values: None
    write_log: Callable[[str, str], None] = lambda _message, _level: None
    is_any_process: Callable[[bool], bool] = bool
    is_checkpoint_due: bool = False
    rollback: tuple[Mapping[str, Any] | None, int] | None = None

    def __repr__(self) -> str:
        names = ("state", "end_step", "steps_per_epoch", "trainer", "model_state", "folder")
        shown = {name: getattr(self, name) for name in names}
        return screen_repr(self, {"run_id": self.job.run_id, "step": self.state.step, **shown})

    @property
    def has_request(self) -> bool:
        """True if a callback requested something of the loop."""
        return self.is_checkpoint_due or self.rollback is not None or self.state.stop_reason is not None

    @property
    def is_main(self) -> bool:
        """True in the one process that may write to files, a terminal or a server."""
        return self.ctx.rank == 0

    def report(self, values: Mapping[str, float]) -> None:
        """Emit metrics of the current step, as an event and to the other callbacks. Any process may call it."""
        self.emit(values)

    def log(self, message: str, level: Literal["info", "warning", "error"] = "info") -> None:
        """Write a message as a `log` event and to the worker's log."""
        if self.is_main:
            self.write_log(message, level)

    def stop(self, reason: str) -> None:
        """End training after this step as if it were the last: final checkpoint, `completed` with the reason.

        Every process must call it at the same step.
        """
        if self.state.stop_reason is None:
            self.state.stop_reason = reason

    def save_checkpoint(self) -> None:
        """Save a checkpoint at the end of this step, in addition to the cadence.

        Every process must call it at the same step.
        """
        self.is_checkpoint_due = True

    def roll_back(self, payload: Mapping[str, Any] | None = None, *, step: int = 0) -> None:
        """After this batch, restore `payload` (what the author's `state_dict` returned at `step`), or the newest
        checkpoint, and continue with the next batch. The batches since then are not trained on again.

        Every process must call it at the same step.
        """
        self.rollback = (payload, step)

    def any_process(self, flag: bool) -> bool:
        """True in every process if `flag` is true in any. A collective call: all must make it at the same step."""
        return self.is_any_process(flag)


class Callback:
    """Override the hooks you need; others are never called.

    Public attributes that changed since training began are saved with every checkpoint and restored on resume.
    Attributes with a leading underscore are not. Override `state_dict` and `load_state_dict` to change this.
    """

    _initial_settings: dict[str, Any]
    _initial_objects: dict[str, Any]
    _only_watches = False  # its `on_validation_begin` changes nothing that a checkpoint holds

    def on_train_begin(self, run: RunHandle) -> None:
        """The state is ready, restored if the run resumes (`run.state.step` is then above 0)."""

    def on_epoch_begin(self, run: RunHandle) -> None:
        """Not called again where a run resumes in the middle of an epoch."""

    def on_batch_begin(self, run: RunHandle, batch: Any) -> None:
        """`batch` is the raw batch. Overriding this costs a call per step."""

    def on_batch_end(self, run: RunHandle, batch: Any, result: StepResult) -> None:
        """The step is committed. Reading a tensor in `result` waits for the device."""

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        """`values` were emitted for `run.state.step`, under their reported names."""

    def on_validation_begin(self, run: RunHandle) -> None: ...

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None: ...

    def on_epoch_end(self, run: RunHandle) -> None: ...

    def on_checkpoint(self, run: RunHandle, checkpoint: "SavedCheckpoint") -> None:
        """Called in the main process only; `checkpoint.step` may be some steps back."""

    def on_train_end(self, run: RunHandle) -> None:
        """Training reached its end; the final checkpoint is durable."""

    def on_exception(self, run: RunHandle, error: BaseException) -> None:
        """Training ended with `error`, which may be a stop request."""

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of this callback. None: its changed public attributes."""
        return None

    def load_state_dict(self, payload: Mapping[str, Any]) -> None:
        """Restore what a checkpoint kept. Constructor arguments keep their new values."""
        for name, value in payload.items():
            setattr(self, name, value)


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
