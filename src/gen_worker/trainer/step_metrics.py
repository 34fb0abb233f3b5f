"""What a step measured, as the names and numbers that are reported. Reading a tensor here waits for its device."""

from collections.abc import Mapping
from typing import Any

from gen_worker.errors import TrainStepError
from gen_worker.trainer.contracts import StepResult
from gen_worker.trainer.repro import to_float_scalar

METRIC_NAMES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}


def read_metrics(result: StepResult, optimizer: Any = None) -> dict[str, float]:
    """The step's metrics under their reported names; a missing learning rate is read from the optimizer."""
    if not isinstance(result.metrics, Mapping):
        raise TrainStepError(
            f"StepResult.metrics is {type(result.metrics).__name__}, expected a dict: StepResult(metrics={{'loss': loss}})"
        )
    values: dict[str, float] = {}
    for name, value in result.metrics.items():
        try:
            values[METRIC_NAMES.get(name, name)] = value if type(value) is float else to_float_scalar(value)
        except (TypeError, ValueError) as fault:
            raise TrainStepError(f"metric {name!r} of train_step is not a number: {fault}") from fault
    groups = getattr(optimizer, "param_groups", None)
    if groups and "train/lr" not in values:
        values["train/lr"] = float(groups[0]["lr"])
    return values
