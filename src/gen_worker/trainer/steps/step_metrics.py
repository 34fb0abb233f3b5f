"""What a step measured, as the names and numbers that are reported. Reading a tensor here waits for its device."""

from collections.abc import Mapping
from typing import Any

from gen_worker.errors import StepResultError, TrainStepError
from gen_worker.trainer.compute.repro import to_float_scalar
from gen_worker.trainer.contracts import StepResult

METRIC_NAMES = {
    "loss": "train/loss",
    "train_loss": "train/loss",
    "lr": "train/lr",
    "learning_rate": "train/lr",
    "train_lr": "train/lr",
}
RATE_NAMES = ("train/lr", "learning_rate", "lr")


def not_a_result(result: Any) -> StepResultError:
    return StepResultError(
        f"train_step returned {type(result).__name__}, expected StepResult or a StepResult-like object with `metrics`:"
        " return StepResult(metrics={'loss': loss})"
    )


def read_metrics(result: StepResult, optimizer: Any = None, state: Any = None) -> dict[str, float]:
    """The step's metrics under their reported names.

    A missing learning rate is read from the optimizer; where there is none, from what the step or the state calls so.
    """
    metrics = {} if result.metrics is None else result.metrics
    if not isinstance(metrics, Mapping):
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
        for name in RATE_NAMES if isinstance(place, Mapping) else ():
            if isinstance(place.get(name), int | float):
                return float(place[name])
    return None
