"""Checkpoints in addition to the job's `checkpoint_every`. The job's `checkpoints` says which are kept."""

from collections.abc import Mapping
from typing import Any

from gen_worker.errors import StartupError
from gen_worker.trainer.attempt.state import Mode, is_better
from gen_worker.trainer.callbacks.base import Callback, RunHandle
from gen_worker.trainer.contracts import StepResult


class ModelCheckpoint(Callback):
    """Saves a checkpoint when `monitor` is at its best, every `every_steps` steps, every `every_epochs` epochs.

    `monitor` is a reported name such as `val/loss` or `train/loss`. It also decides which checkpoints are the best to
    keep; with `save_on_best=False` only that. The default without any setting is the metric of early stopping, else
    `val/loss`. A cadence of 0 is off.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Mode = "min",
        save_on_best: bool = True,
        every_steps: int = 0,
        every_epochs: int = 0,
    ) -> None:
        if mode not in ("min", "max"):
            raise StartupError(f"ModelCheckpoint: mode is {mode!r}, expected 'min' or 'max'")
        if every_steps < 0 or every_epochs < 0:
            raise StartupError(
                f"ModelCheckpoint: every_steps is {every_steps} and every_epochs {every_epochs}, expected 0 (off) or more"
            )
        self.monitor = monitor
        self.mode: Mode = mode
        self.save_on_best = save_on_best
        self.every_steps = every_steps
        self.every_epochs = every_epochs
        self.best: float | None = None
        self.best_step = 0
        self._watched = monitor
        self._mode: Mode = mode
        if every_steps:
            self.on_batch_end = self._save_every_steps  # type: ignore[method-assign]  # else no call per step

    def on_train_begin(self, run: RunHandle) -> None:
        if self.monitor is None and not (self.every_steps or self.every_epochs):
            stopping = run.job.early_stopping
            self._watched, self._mode = (
                ("val/loss", self.mode) if stopping is None else (stopping.metric, stopping.mode)
            )

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        name = self._watched
        if name is None or name not in values:
            return
        value = values[name]
        if not is_better(value, float("nan") if self.best is None else self.best, self._mode):
            return
        self.best, self.best_step = value, run.state.step
        run.state.note_best(name, value, self._mode)
        if self.save_on_best:
            run.save_checkpoint()

    def on_epoch_end(self, run: RunHandle) -> None:
        if self.every_epochs and run.state.epoch and run.state.epoch % self.every_epochs == 0:
            run.save_checkpoint()

    def _save_every_steps(self, run: RunHandle, batch: Any, result: StepResult) -> None:  # noqa: ARG002
        if run.state.step % self.every_steps == 0:
            run.save_checkpoint()
