"""Metrics by their torchmetrics names, computed over a whole evaluation."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from gen_worker.errors import SpecError
from gen_worker.pytorch.config import MetricSpec
from gen_worker.pytorch.model.names import (
    argument_faults,
    import_reference,
    is_reference,
    try_call,
    unknown_name,
)

_NAMESPACES = ("torchmetrics", "torchmetrics.classification", "torchmetrics.regression", "torchmetrics.text")
_RESERVED = ("loss",)


def metric_faults(specs: Mapping[str, MetricSpec]) -> list[str]:
    """Faults of the metrics, found by building them."""
    if not specs:
        return []
    try:
        known = _known()
    except ImportError:
        return [
            "hyperparams.metrics: torchmetrics is not installed: pip install 'trn[torch]', or remove `metrics`"
        ]
    return [fault for name, spec in specs.items() for fault in _build(name, spec, known)[1]]


def build_metrics(specs: Mapping[str, MetricSpec], *, device: str) -> dict[str, Any]:
    """Name -> metric, on the device."""
    if not specs:
        return {}
    known = _known()
    built = {name: _build(name, spec, known) for name, spec in specs.items()}
    faults = [fault for _, found in built.values() for fault in found]
    if faults:
        raise SpecError("the metrics cannot be built", faults)
    return {name: metric.to(device) for name, (metric, _) in built.items()}


def _known() -> dict[str, type]:
    from torchmetrics import Metric

    found: dict[str, type] = {}
    for namespace in _NAMESPACES:
        for name, value in vars(import_module(namespace)).items():
            if isinstance(value, type) and issubclass(value, Metric) and value is not Metric:
                found.setdefault(name, value)
    return found


def _build(name: str, spec: MetricSpec, known: Mapping[str, type]) -> tuple[Any, list[str]]:
    path = f"hyperparams.metrics.{name}"
    if name in _RESERVED:
        return None, [f"{path}: `{name}` is always reported: choose another name"]
    kind: Any = known.get(spec.type)
    if is_reference(spec.type):
        kind, faults = import_reference(f"{path}.type", spec.type)
        if faults:
            return None, faults
    elif kind is None:
        what = "a class of torchmetrics, or module:symbol"
        return None, [unknown_name(f"{path}.type", spec.type, known, what)]
    faults = argument_faults(f"{path}.args", kind, spec.args)
    if faults:
        return None, faults
    built, faults = try_call(f"{path}.args", kind, **spec.args)
    if not faults and not all(hasattr(built, hook) for hook in ("update", "compute", "reset", "to")):
        faults = [f"{path}.type: {spec.type} is not a metric: it needs update, compute, reset and to"]
    return built, faults


class Evaluation:
    """The metrics of one pass over held-out data, and its loss if that is not a mean over rows."""

    def __init__(
        self, metrics: Mapping[str, Any], *, select: Callable[[Any, Any], tuple[Any, Any]] | None = None
    ) -> None:
        self._metrics = metrics
        self._select = select
        self._total: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        for metric in metrics.values():
            metric.reset()

    def add_loss(self, total: torch.Tensor, count: torch.Tensor) -> None:
        total, count = total.double(), count.double()
        self._total = total if self._total is None else self._total + total
        self._count = count if self._count is None else self._count + count

    def update(self, output: Any, target: Any) -> None:
        """Add one batch. Does not wait for a device."""
        if self._select is not None:
            output, target = self._select(output, target)
        if isinstance(target, torch.Tensor) and target.numel() == 0:
            return  # only padding
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            output = output.float()
        for metric in self._metrics.values():
            metric.update(output, _as_classes(metric, target))

    def result(self, *, world_size: int, device: str) -> dict[str, Any]:
        """All values over all processes. A metric with several values gets a name for each."""
        values: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            values |= _named(name, metric.compute())
            metric.reset()
        if self._total is not None or world_size > 1:
            sums = torch.zeros(2, dtype=torch.float64)
            if self._total is not None and self._count is not None:
                sums = torch.stack([self._total, self._count])
            if world_size > 1:
                sums = sums.to(device)
                torch.distributed.all_reduce(sums)
            if float(sums[1]) > 0:
                values["loss"] = sums[0] / sums[1]
        return values


def _as_classes(metric: Any, target: Any) -> Any:
    """Classification metrics need integer targets; a loss such as `bce` needs floats."""
    is_float = isinstance(target, torch.Tensor) and target.is_floating_point()
    is_classification = type(metric).__module__.startswith("torchmetrics.classification")
    return target.long() if is_float and is_classification else target


def _named(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": item for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim == 1 and len(value) > 1:
        return {f"{name}_{index}": item for index, item in enumerate(value)}
    return {name: value}
