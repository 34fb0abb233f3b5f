"""The metrics of a step: read, recorded, reported, uploaded; and the one that decides which checkpoints are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gen_worker.errors import StepResultError, TrainStepError
from gen_worker.trainer.attempt.state import MetricsRecord, Mode
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepResult
from gen_worker.trainer.steps.loop_parts import LoopParts

METRIC_NAMES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}
RATE_NAMES = ("train/lr", "learning_rate", "lr")


@dataclass(slots=True)
class Measurements:
    parts: LoopParts
    _is_finite: bool = True  # as far as it was reported in this attempt

    def take(self, values: Mapping[str, float]) -> None:
        """Report metrics of the present step, under their reported names."""
        self._note(values)
        loss = values.get("train/loss", 0.0)
        if self._is_finite and not math.isfinite(loss):
            self._is_finite = False
            self.parts.reporter.log(
                f"train/loss is {loss} at step {self.parts.ctx.step}, and training continues. The callback"
                " gen_worker.trainer.callbacks:NonFiniteGuard stops such a run, or goes back",
                level="warning",
            )
        self.parts.reporter.metrics(self.parts.ctx.step, values)

    def take_evaluation(self, record: MetricsRecord) -> None:
        """Report the result of a validation or test."""
        self._note(record.metrics)
        if record.kind == "validation":
            duration_s = round(record.duration_s, 3)
            self.parts.reporter.validation(
                record.step, record.metrics, rows=record.rows, duration_s=duration_s
            )
        else:
            self.parts.reporter.metrics(record.step, record.metrics)

    def metric_of(self, step: int) -> tuple[str, float, str] | None:
        """(name, value, mode) of the metric that decides about checkpoints, if this step has measured it."""
        state = self.parts.trainer_state
        name, mode = self._deciding_metric()
        if state.best is not None and state.best.name != name:  # a callback watches another one
            name, mode = state.best.name, state.best.mode
        return (name, state.metrics[name], mode) if state.measured_at.get(name) == step else None

    def _note(self, values: Mapping[str, float]) -> None:
        state = self.parts.trainer_state
        state.note(values)
        name, mode = self._deciding_metric()
        if name in values and (
            state.best is None or state.best.name == name
        ):  # else a callback chose another
            state.note_best(name, values[name], mode)
        if self.parts.uploader is not None and values:
            self.parts.uploader.upload_metrics(metrics=values, step=self.parts.ctx.step)

    def _deciding_metric(self) -> tuple[str, Mode]:
        """The metric of early stopping, else the loss."""
        stopping = self.parts.ctx.job.early_stopping
        if stopping is not None:
            return stopping.metric, stopping.mode
        return "val/loss" if self.parts.validation is not None else "train/loss", "min"


def not_a_result(result: Any) -> StepResultError:
    return StepResultError(
        f"train_step returned {'None' if result is None else type(result).__name__}, expected StepResult or a"
        " StepResult-like object with `metrics`:"
        " return StepResult(metrics={'loss': loss})"
    )


def read_metrics(result: StepResult, optimizer: Any = None, state: Any = None) -> dict[str, float]:
    """The step's metrics under their reported names. Reading a tensor waits for its device.

    A missing learning rate is read from the optimizer, else from `debug` or the state by name.
    """
    metrics = {} if result.metrics is None else result.metrics
    if type(metrics) is not dict and not isinstance(metrics, Mapping):
        raise TrainStepError(
            f"StepResult.metrics is {type(metrics).__name__}, expected a dict: StepResult(metrics={{'loss': loss}})"
        )
    values: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            values[METRIC_NAMES.get(name, name)] = value if type(value) is float else to_float_scalar(value)
        except (TypeError, ValueError) as fault:
            raise TrainStepError(f"metric {name!r} of train_step is not a number: {fault}") from fault
    if "train/lr" not in values:
        groups = getattr(optimizer, "param_groups", None)
        found = groups[0]["lr"] if groups else _named_rate(getattr(result, "debug", None), state)
        if found is not None:
            values["train/lr"] = float(found)
    return values


def _named_rate(*places: Any) -> float | None:
    for place in places:
        if type(place) is not dict and not isinstance(place, Mapping):
            continue
        for name in RATE_NAMES:
            if isinstance(place.get(name), int | float):
                return float(place[name])
    return None
