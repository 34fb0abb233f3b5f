"""Losses by name: the mean of a batch, and how to combine batches.

Most losses are a mean over rows; several batches are weighted by their rows. Where the denominator is another number
(tokens without padding, weights of classes), a loss has `total` and `count`. The mean over several batches is then the
sum of totals divided by the sum of counts.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gen_worker.errors import SpecError
from gen_worker.pytorch.config import LossSpec
from gen_worker.pytorch.model.names import (
    argument_faults,
    import_reference,
    is_reference,
    try_call,
    unknown_name,
)

Tensor = torch.Tensor

NEXT_TOKEN = "next_token"  # noqa: S105  (not a secret)
# Short names and class names of torch.nn -> the function.
FUNCTION_BY_NAME = {
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "mse": "mse_loss",
    "l1": "l1_loss",
    "smooth_l1": "smooth_l1_loss",
    "huber": "huber_loss",
    "nll": "nll_loss",
    "poisson_nll": "poisson_nll_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "HuberLoss": "huber_loss",
    "KLDivLoss": "kl_div",
    "L1Loss": "l1_loss",
    "MSELoss": "mse_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "NLLLoss": "nll_loss",
    "PoissonNLLLoss": "poisson_nll_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "SoftMarginLoss": "soft_margin_loss",
}
_TENSOR_ARGS = ("weight", "pos_weight")
_OLD_ARGS = ("size_average", "reduce")
_TORCH_IGNORE_INDEX = -100


def _takes_output_and_target(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return [each.name for each in parameters if each.default is each.empty] == ["input", "target"]


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: found
    for name, found in vars(functional).items()
    if (name.endswith(("_loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div")
    and not name.startswith("_")
    and _takes_output_and_target(found)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`mean` of one batch; `total` and `count` if it is not a mean over rows."""

    mean: Callable[[Any, Any], Tensor]
    total: Callable[[Any, Any], Tensor] | None = None
    count: Callable[[Any], Tensor] | None = None


def loss_faults(spec: LossSpec) -> list[str]:
    """Faults of a loss's name and arguments."""
    path = "hyperparams.loss"
    if is_reference(spec.name):
        return _custom(spec)[1]
    if spec.name == NEXT_TOKEN:
        return argument_faults(f"{path}.args", _next_token_signature, spec.args)
    function = FUNCTIONS.get(FUNCTION_BY_NAME.get(spec.name, spec.name))
    if function is None:
        known = [NEXT_TOKEN, *FUNCTION_BY_NAME, *FUNCTIONS]
        what = "next_token, a loss of torch.nn on (output, target), or module:symbol"
        return [unknown_name(f"{path}.name", spec.name, known, what)]
    faults = argument_faults(f"{path}.args", function, spec.args, ours=("input", "target", *_OLD_ARGS))
    if spec.args.get("reduction", "mean") not in ("mean", "batchmean"):
        faults.append(f"{path}.args.reduction: found {spec.args['reduction']!r}, expected a mean: remove it")
    for name in _TENSOR_ARGS:
        if name in spec.args:
            faults += try_call(f"{path}.args.{name}", torch.tensor, spec.args[name], dtype=torch.float32)[1]
    return faults


def build_loss(spec: LossSpec, *, device: torch.device, pad_id: int | None = None) -> Loss:
    """`pad_id` is the token that `next_token` ignores; None if there is no padding."""
    if is_reference(spec.name):
        built, faults = _custom(spec)
        if faults:
            raise SpecError("the loss cannot be built", faults)
        if isinstance(built, torch.nn.Module):
            built.to(device)
        return Loss(mean=built, total=getattr(built, "total", None), count=getattr(built, "count", None))
    if spec.name == NEXT_TOKEN:
        return _next_token(spec.args, pad_id)
    name = FUNCTION_BY_NAME.get(spec.name, spec.name)
    function = FUNCTIONS[name]
    args = {
        key: torch.tensor(value, dtype=torch.float32, device=device) if key in _TENSOR_ARGS else value
        for key, value in spec.args.items()
    }
    mean = partial(function, **args) if args else function
    if name not in ("cross_entropy", "nll_loss") or not {"weight", "ignore_index"} & args.keys():
        return Loss(mean=mean)
    ignored = spec.args.get("ignore_index", _TORCH_IGNORE_INDEX)
    weight = args.get("weight")
    return Loss(
        mean=mean,
        total=partial(function, **{**args, "reduction": "sum"}),
        count=lambda target: count_classes(target, ignored, weight),
    )


def count_classes(target: Tensor, ignored: int, weight: Tensor | None = None) -> Tensor:
    """The denominator of torch's mean over classes: targets that are not ignored, weighted by class."""
    if target.is_floating_point():  # probabilities of classes: torch divides by the positions
        return torch.tensor(target.numel() // target.shape[1], dtype=torch.float32, device=target.device)
    kept = target != ignored
    if weight is None:
        return kept.sum(dtype=torch.float32)
    return torch.where(kept, weight[target.clamp(min=0)], 0.0).sum()


def _next_token_signature(label_smoothing: float = 0.0) -> None:
    """Only for its signature."""


_next_token_signature.__name__ = NEXT_TOKEN


def _next_token(args: Mapping[str, Any], pad_id: int | None) -> Loss:
    """Cross entropy of (rows, positions, vocabulary) logits and the tokens that follow."""
    cross_entropy = functional.cross_entropy

    def plain(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), target.flatten(), **args)

    if pad_id is None:
        return Loss(mean=plain)  # every row has the same number of targets: a mean over rows

    def total(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=pad_id, reduction="sum", **args
        )

    def count(target: Tensor) -> Tensor:
        return (target != pad_id).sum(dtype=torch.float32)

    def mean(logits: Tensor, target: Tensor) -> Tensor:
        return total(logits, target) / count(target).clamp(min=1)  # a batch may be only padding

    return Loss(mean=mean, total=total, count=count)


def _custom(spec: LossSpec) -> tuple[Any, list[str]]:
    """A class is built with the arguments; a function is called with them after (output, target)."""
    path = "hyperparams.loss"
    found, faults = import_reference(f"{path}.name", spec.name)
    if faults:
        return None, faults
    if isinstance(found, type):
        faults = argument_faults(f"{path}.args", found, spec.args)
        built, more = (None, []) if faults else try_call(f"{path}.args", found, **spec.args)
        if not faults and not more and not callable(built):
            more = [f"{path}.name: {spec.name} makes a {type(built).__name__}, which is not callable"]
        return built, faults + more
    if not callable(found):
        return None, [f"{path}.name: {spec.name} is a {type(found).__name__}, expected a class or a function"]
    return partial(found, **spec.args) if spec.args else found, []
