"""Early stopping."""

from collections.abc import Mapping
from typing import Any

from gen_worker.contract.job.spec import EarlyStoppingSpec
from gen_worker.errors import TrainStepError
from gen_worker.trainer.attempt.state import MetricsRecord, Mode, is_better
from gen_worker.trainer.author.plugin_import import nearest_names
from gen_worker.trainer.callbacks.base import Callback, RunHandle


class EarlyStopping(Callback):
    """Stops training when a metric has not improved for `patience` reports in a row."""

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

    def reset_patience(self) -> None:
        """Reset the count; the best value stays."""
        self.num_without_improvement = 0

    def on_metrics(self, run: RunHandle, values: Mapping[str, float]) -> None:
        if self.metric not in values:
            if self.metric.startswith("train/") and "train/loss" in values:
                raise self._unknown("train_step", values)
            return
        value = values[self.metric]
        if self.best is None or is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.best_step, self.num_without_improvement = value, run.state.step, 0
            return
        self.num_without_improvement += 1
        if self.num_without_improvement >= self.patience:
            way = "fall below" if self.mode == "min" else "rise above"
            run.stop(
                f"{self.metric} did not {way} {self.best:.6g} (step {self.best_step}) in"
                f" {self.num_without_improvement} reports"
            )

    def on_validation_end(self, run: RunHandle, record: MetricsRecord) -> None:
        is_elsewhere = self.metric.startswith("train/") or self.metric in run.state.metrics
        if not is_elsewhere and self.metric not in record.metrics:
            raise self._unknown("validation", record.metrics)

    def _unknown(self, giver: str, found: Mapping[str, float]) -> TrainStepError:
        nearest = nearest_names(self.metric, list(found))
        hint = f": did you mean {nearest[0]!r}?" if nearest else ""
        return TrainStepError(
            f"early stopping watches {self.metric!r}, which {giver} did not report. Set early_stopping.metric to one of:"
            f" {', '.join(found) or 'none'}{hint}"
        )
