"""The default optimizer: AdamW with warm-up and cosine."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gen_worker.errors import SpecError, StartupError
from gen_worker.trainer.author.hyperparams import RunLength, ScheduleLength
from gen_worker.trainer.compute.schedule import warmup_cosine_factor

if TYPE_CHECKING:
    import torch

_LENGTHS = ("total_steps", "max_steps")


class AdamWBundle(NamedTuple):
    """Step the optimizer, then the scheduler, once per training step. Both are None where there are no parameters."""

    optimizer: "torch.optim.AdamW"
    scheduler: "torch.optim.lr_scheduler.LambdaLR"


class _Settings(NamedTuple):
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    warmup_steps: int
    total_steps: int | None
    min_lr_ratio: float


def build_default_adamw_bundle(
    model_or_params: Any, hyperparams: Mapping[str, Any] | None = None, *, total_steps: int | None = None
) -> AdamWBundle:
    """AdamW over the trainable parameters, with a linear warm-up and then a cosine down to `min_lr_ratio`.

    `model_or_params`: a module, parameters, (name, parameter) pairs, or parameter groups. No parameters give a bundle
    of two None; parameters that are all frozen are an error.
    Read from `hyperparams`: `learning_rate` or `lr` (1e-4), `weight_decay` (0.01), `betas` ((0.9, 0.999)),
    `eps` (1e-8), `warmup_steps` (0), `total_steps` or `max_steps`, `min_lr_ratio` (0; 1 keeps the rate constant).
    Other names are the author's own and are ignored.
    Where `hyperparams` gives no length, it is `total_steps`, else that of the run, where `hyperparams` is
    `ctx.job.hyperparams`. Without any, the rate stays constant after the warm-up.
    The rate is a function of the scheduler's step count alone, so a resumed run continues exactly.
    """
    import torch

    hyperparams = {} if hyperparams is None else hyperparams
    settings = _read_settings(hyperparams)
    groups = _trainable_groups(model_or_params)
    if not groups:
        return AdamWBundle(None, None)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    length = settings.total_steps
    run_length: RunLength | None = getattr(hyperparams, "run_length", None)
    if length is None:
        length = total_steps if run_length is None or total_steps is not None else run_length.steps
    if length is not None and run_length is not None:
        given = next((name for name in _LENGTHS if settings.total_steps and name in hyperparams), None)
        setting = None if given is None else f"hyperparams.{given}"
        run_length.schedules.append(ScheduleLength(length, settings.min_lr_ratio, setting))
    factor = warmup_cosine_factor(settings.warmup_steps, length, settings.min_lr_ratio)
    return AdamWBundle(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))


def _read_settings(hyperparams: Mapping[str, Any]) -> _Settings:
    faults: list[str] = []

    def read(names: tuple[str, ...], default: Any, accepts: Callable[[Any], bool], expected: str) -> Any:
        name = next((name for name in names if hyperparams.get(name) is not None), None)
        if name is None:
            return default
        value = hyperparams[name]
        if accepts(value):
            return value
        faults.append(f"{name}: found {value!r:.60}, expected {expected}")
        return default

    if None not in (hyperparams.get("lr"), hyperparams.get("learning_rate")):
        faults.append("lr: given together with `learning_rate`, expected one of the two")
    above_0 = (lambda v: _is_number(v) and v > 0), "a number above 0"
    betas = read(("betas",), (0.9, 0.999), _are_betas, "two numbers from 0 to below 1")
    settings = _Settings(
        learning_rate=float(read(("learning_rate", "lr"), 1e-4, *above_0)),
        weight_decay=float(
            read(("weight_decay",), 0.01, lambda v: _is_number(v) and v >= 0, "a number of at least 0")
        ),
        betas=(float(betas[0]), float(betas[1])),
        eps=float(read(("eps",), 1e-8, *above_0)),
        warmup_steps=read(
            ("warmup_steps",), 0, lambda v: type(v) is int and v >= 0, "a whole number of at least 0"
        ),
        total_steps=read(_LENGTHS, None, lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
        min_lr_ratio=float(
            read(("min_lr_ratio",), 0.0, lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1")
        ),
    )
    if settings.total_steps is not None and settings.warmup_steps > settings.total_steps:
        faults.append(
            f"warmup_steps: found {settings.warmup_steps}, expected at most the {settings.total_steps} steps in all"
        )
    if faults:
        raise SpecError("hyperparams", faults)
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_betas(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _trainable_groups(model_or_params: Any) -> list[dict[str, Any]]:
    import torch

    if model_or_params is None:
        return []
    if isinstance(model_or_params, torch.nn.Module):
        given: list[Any] = list(model_or_params.parameters())
    elif isinstance(model_or_params, torch.Tensor):
        given = [model_or_params]
    else:
        given = list(model_or_params)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    trainable, num_members = [], 0
    for group in groups:
        members = group["params"]
        members = (
            [members] if isinstance(members, torch.Tensor) else [_parameter(member) for member in members]
        )
        num_members += len(members)
        members = [member for member in members if member.requires_grad]
        if members:
            trainable.append({**group, "params": members})
    if num_members and not trainable:
        raise StartupError(
            "no parameter has requires_grad set, so there is nothing to train: unfreeze some, or pass another module"
        )
    return trainable


def _parameter(member: Any) -> "torch.Tensor":
    import torch

    found = member[1] if isinstance(member, tuple) and len(member) == 2 else member
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"expected a module, parameters or parameter groups, found a {type(found).__name__} among them"
        )
    return found
