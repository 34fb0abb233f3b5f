"""When more training is of no use."""

from collections.abc import Mapping
from typing import Any

from gen_worker.errors import TrainStepError
from gen_worker.trainer.callbacks.base import Callback, RunHandle
from gen_worker.trainer.contracts import EarlyStoppingSpec
from gen_worker.trainer.state import MetricsRecord, Mode, is_better


class EarlyStopping(Callback):
    """Ends training when a metric has not improved for `patience` of its reports in a row."""

    def __init__(
        self, metric: str = "val/loss", mode: Mode = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        self.metric = metric
        self.mode: Mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_without_improvement = 0

    @classmethod
    def from_spec(cls, spec: EarlyStoppingSpec) -> "EarlyStopping":
        return cls(metric=spec.metric, mode=spec.mode, patience=spec.patience, min_delta=spec.min_delta)

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "mode": self.mode,
            "best": self.best,
            "best_step": self.best_step,
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, payload: Mapping[str, Any]) -> None:
        if (payload["metric"], payload["mode"]) == (self.metric, self.mode):  # else it counted something else
            super().load_state_dict(payload)

    def forgive(self) -> None:
        """Begin to count anew; what was best stays so."""
        self.num_without_improvement = 0

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        if self.metric not in values:
            return
        value = values[self.metric]
        if self.best is None or is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.best_step, self.num_without_improvement = value, run.state.step, 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            run.stop(
                f"{self.metric} did not improve on {self.best:.6g} (step {self.best_step}) in"
                f" {self.num_without_improvement} reports"
            )

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:  # noqa: ARG002
        if self.metric.startswith("val/") and self.metric not in record.metrics:
            raise TrainStepError(
                f"validation gave no {self.metric!r}, which early stopping watches; it gave"
                f" {', '.join(record.metrics) or 'nothing'}: name one of these as early_stopping.metric"
            )
