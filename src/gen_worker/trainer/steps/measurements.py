"""What was measured: into the state, the event file and the uploads; and what of it decides which checkpoints to keep."""

from collections.abc import Mapping
from dataclasses import dataclass

from gen_worker.trainer.attempt.state import MetricsRecord, Mode, TrainerState
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.steps.parts import LoopReporter, LoopUploader


@dataclass(slots=True, kw_only=True)
class Measurements:
    ctx: StepContext
    state: TrainerState
    reporter: LoopReporter
    uploader: LoopUploader | None
    is_validated: bool

    def take(self, values: Mapping[str, float]) -> None:
        """Metrics of the step just committed, under their reported names."""
        self._note(values)
        self.reporter.metrics(self.ctx.step, values)

    def take_evaluation(self, record: MetricsRecord) -> None:
        """The result of a pass over held-out data."""
        self._note(record.metrics)
        if record.kind == "validation":
            duration_s = round(record.duration_s, 3)
            self.reporter.validation(record.step, record.metrics, rows=record.rows, duration_s=duration_s)
        else:
            self.reporter.metrics(record.step, record.metrics)

    def metric_of(self, step: int) -> tuple[str, float, str] | None:
        """What this very step measured: a checkpoint is not to be kept for the value of another one."""
        state = self.state
        name, mode = self._deciding_metric()
        if state.best is not None and state.best.name != name:  # a callback watches another one
            name, mode = state.best.name, state.best.mode
        return (name, state.metrics[name], mode) if state.measured_at.get(name) == step else None

    def _note(self, values: Mapping[str, float]) -> None:
        state = self.state
        state.note(values)
        name, mode = self._deciding_metric()
        if name in values and (
            state.best is None or state.best.name == name
        ):  # else a callback chose another
            state.note_best(name, values[name], mode)
        if self.uploader is not None and values:
            self.uploader.upload_metrics(metrics=values, step=self.ctx.step)

    def _deciding_metric(self) -> tuple[str, Mode]:
        """What early stopping watches, else the loss."""
        stopping = self.ctx.job.early_stopping
        if stopping is not None:
            return stopping.metric, stopping.mode
        return "val/loss" if self.is_validated else "train/loss", "min"
