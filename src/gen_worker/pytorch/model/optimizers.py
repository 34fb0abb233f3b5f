"""Optimizer, learning-rate schedule and weight average of a config, by the names of torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from gen_worker.errors import SpecError, StartupError
from gen_worker.pytorch.config import OptimizerSpec, SchedulerSpec
from gen_worker.pytorch.model.names import (
    argument_faults,
    first_line,
    import_reference,
    try_call,
    unknown_name,
)
from gen_worker.trainer.compute.schedule import warmup_cosine_factor

WARMUP_COSINE = "warmup_cosine"
COMPOSED = ("SequentialLR", "ChainedScheduler")
_LAMBDAS = ("LambdaLR", "MultiplicativeLR")

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
}
SCHEDULERS: dict[str, type[torch.optim.lr_scheduler.LRScheduler]] = {
    name: found
    for name, found in vars(torch.optim.lr_scheduler).items()
    if isinstance(found, type)
    and issubclass(found, torch.optim.lr_scheduler.LRScheduler)
    and not name.startswith("_")
    and name != "LRScheduler"
}


def optimizer_faults(spec: OptimizerSpec, learning_rate: float = 1e-3) -> list[str]:
    """Faults of the optimizer, found by building it."""
    path = "hyperparams.optimizer"
    if spec.name == "LBFGS":
        return [
            f"{path}.name: LBFGS needs several losses per step, which the runner does not support: use another"
        ]
    if spec.name not in OPTIMIZERS:
        return [unknown_name(f"{path}.name", spec.name, OPTIMIZERS, "a class of torch.optim")]
    kind = OPTIMIZERS[spec.name]
    if "lr" in spec.args:
        return [f"{path}.args.lr: use `hyperparams.learning_rate` instead"]
    faults = argument_faults(f"{path}.args", kind, spec.args, ours=("params", "lr"))
    if faults:
        return faults
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    return try_call(f"{path}.args", kind, [parameter], lr=learning_rate, **_plain_args(spec.args))[1]


def build_optimizer(
    spec: OptimizerSpec, module: torch.nn.Module, learning_rate: float
) -> torch.optim.Optimizer:
    """Over the trainable parameters; those of `no_weight_decay` are a group of their own."""
    named = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    if not named:
        raise StartupError("no parameter to train: hyperparams.freeze matches all, or the model has none")
    free = _without_decay(spec, named)
    groups: list[dict[str, Any]] = [{"params": [value for name, value in named if name not in free]}]
    if free:
        groups.append({"params": [value for name, value in named if name in free], "weight_decay": 0.0})
    built, faults = try_call(
        "hyperparams.optimizer.args",
        OPTIMIZERS[spec.name],
        [group for group in groups if group["params"]],
        lr=learning_rate,
        **_plain_args(spec.args),
    )
    if faults:
        raise SpecError("the optimizer cannot be built", faults)
    assert isinstance(built, torch.optim.Optimizer)
    return built


def _plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}


def _without_decay(spec: OptimizerSpec, named: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
    if spec.no_weight_decay == "auto":
        return {name for name, value in named if value.ndim < 2}
    faults, free = [], set()
    for index, pattern in enumerate(spec.no_weight_decay):
        found = {name for name, _ in named if fnmatchcase(name, pattern)}
        if not found:
            path = f"hyperparams.optimizer.no_weight_decay[{index}]"
            faults.append(unmatched_pattern(path, pattern, [name for name, _ in named]))
        free |= found
    if faults:
        raise SpecError("the optimizer cannot be built", faults)
    return free


def unmatched_pattern(path: str, pattern: str, names: Sequence[str]) -> str:
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f'{path}: "{pattern}" matches no parameter, expected a pattern for {shown}'


@dataclass(slots=True, kw_only=True)
class Schedule:
    """A torch scheduler and when to step it. `epochs` counts the epochs it was stepped for."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    is_by_epoch: bool
    epochs: int = 0

    def follow_epoch(self, epoch: int) -> None:
        """Catch up with the epochs that ended before this step."""
        while self.epochs < epoch:
            self.scheduler.step()
            self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        state = {"scheduler": _plain_state(self.scheduler.state_dict())}
        return {**state, "epochs": self.epochs} if self.is_by_epoch else state

    def load_state_dict(self, payload: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(_like(payload["scheduler"], self.scheduler.state_dict()))
        self.epochs = int(payload.get("epochs", 0))


def scheduler_faults(spec: SchedulerSpec, path: str = "hyperparams.scheduler") -> list[str]:
    """Faults of the schedule, found by building and stepping it."""
    faults = _scheduler_name_faults(spec, path)
    if faults:
        return faults
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1, momentum=0.9)
    built, faults = _build(spec, optimizer, total_steps=2, path=path)
    return faults or _trial_faults(built, optimizer, f"{path}.args")


def _trial_faults(scheduler: Any, optimizer: torch.optim.Optimizer, path: str) -> list[str]:
    """Some wrong arguments raise only when a schedule is stepped."""
    try:
        for _ in range(2):
            optimizer.step()
            scheduler.step()
    except ValueError as error:
        return [] if "total" in str(error) else [f"{path}: {first_line(error)}"]
    except (TypeError, ArithmeticError, LookupError, RuntimeError) as error:
        return [f"{path}: stepping the schedule raised {type(error).__name__}: {first_line(error)}"]
    return []


def build_schedule(
    spec: SchedulerSpec, optimizer: torch.optim.Optimizer, *, total_steps: int | None
) -> Schedule:
    """`total_steps` (in epochs with `every: epoch`) is the default end of `warmup_cosine`."""
    if spec.name == WARMUP_COSINE and "total_steps" not in spec.args and total_steps is None:
        raise SpecError(
            "the schedule cannot be built",
            [
                "hyperparams.scheduler.args.total_steps: missing, and the length of the job is unknown: set it, or"
                " `max_steps`"
            ],
        )
    built, faults = _build(spec, optimizer, total_steps=total_steps, path="hyperparams.scheduler")
    if faults:
        raise SpecError("the schedule cannot be built", faults)
    assert isinstance(built, torch.optim.lr_scheduler.LRScheduler)
    return Schedule(scheduler=built, is_by_epoch=spec.every == "epoch")


def _scheduler_name_faults(spec: SchedulerSpec, path: str) -> list[str]:
    if spec.name == "ReduceLROnPlateau":
        return [
            f"{path}.name: ReduceLROnPlateau depends on a metric. A schedule must depend on the step alone, so that a"
            f" resume is exact: use {WARMUP_COSINE} or another class"
        ]
    if spec.name not in SCHEDULERS and spec.name != WARMUP_COSINE:
        known = [*SCHEDULERS, WARMUP_COSINE]
        what = f"{WARMUP_COSINE} or a class of torch.optim.lr_scheduler"
        return [unknown_name(f"{path}.name", spec.name, known, what)]
    faults = []
    if spec.name in COMPOSED and not spec.schedulers:
        faults.append(f"{path}.schedulers: missing, expected the schedules that {spec.name} combines")
    if spec.name not in COMPOSED and spec.schedulers:
        faults.append(f"{path}.schedulers: only {' and '.join(COMPOSED)} take schedules, not {spec.name}")
    for index, part in enumerate(spec.schedulers):
        inner = f"{path}.schedulers[{index}]"
        faults += _scheduler_name_faults(part, inner)
        if part.every != "step":
            faults.append(f"{inner}.every: set it only in the outermost schedule")
    if spec.name == WARMUP_COSINE:
        return faults + _warmup_cosine_faults(spec, f"{path}.args")
    ours = ("optimizer", "schedulers", "last_epoch")
    return faults + argument_faults(f"{path}.args", SCHEDULERS[spec.name], spec.args, ours=ours)


def _warmup_cosine_faults(spec: SchedulerSpec, path: str) -> list[str]:
    def schedule(warmup_steps: int = 0, total_steps: int = 0, min_lr_ratio: float = 0.0) -> None:
        """Only for its signature."""

    schedule.__name__ = WARMUP_COSINE
    faults = argument_faults(path, schedule, spec.args)
    for name, minimum in (("warmup_steps", 0), ("total_steps", 1)):
        value = spec.args.get(name)
        if value is not None and (type(value) is not int or value < minimum):
            faults.append(f"{path}.{name}: found {value!r}, expected an integer of at least {minimum}")
    ratio = spec.args.get("min_lr_ratio", 0.0)
    if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
        faults.append(f"{path}.min_lr_ratio: found {ratio!r}, expected a number from 0 to 1")
    return faults


def _build(
    spec: SchedulerSpec, optimizer: torch.optim.Optimizer, *, total_steps: int | None, path: str
) -> tuple[Any, list[str]]:
    args: dict[str, Any] = dict(spec.args)
    if spec.name == WARMUP_COSINE:
        factor = warmup_cosine_factor(
            args.get("warmup_steps", 0), args.get("total_steps", total_steps), args.get("min_lr_ratio", 0.0)
        )
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor), []
    if spec.name in _LAMBDAS:
        factor, faults = import_reference(f"{path}.args.lr_lambda", str(args["lr_lambda"]))
        if faults:
            return None, faults
        args["lr_lambda"] = lambda step: float(factor(step))  # torch cannot save the state of a builtin
    kind = SCHEDULERS[spec.name]
    if spec.name not in COMPOSED:
        return try_call(f"{path}.args", kind, optimizer, **args)
    parts, faults = [], []
    for index, part in enumerate(spec.schedulers):
        built, more = _build(part, optimizer, total_steps=total_steps, path=f"{path}.schedulers[{index}]")
        parts.append(built)
        faults += more
    if faults:
        return None, faults
    if spec.name == "ChainedScheduler":
        return try_call(f"{path}.args", kind, parts, optimizer=optimizer, **args)
    return try_call(f"{path}.args", kind, optimizer, parts, **args)


def _plain_state(state: Any) -> Any:
    """A scheduler's state in plain containers, for a checkpoint."""
    if isinstance(state, Mapping):
        return {key: _plain_state(value) for key, value in state.items()}
    return [_plain_state(item) for item in state] if type(state) is list else state


def _like(saved: Any, live: Any) -> Any:
    """`saved` with the container types of the live state."""
    if isinstance(live, Counter):
        return Counter(saved)
    if isinstance(live, Mapping) and isinstance(saved, Mapping):
        return {key: _like(value, live.get(key)) for key, value in saved.items()}
    if isinstance(live, list) and isinstance(saved, list) and len(live) == len(saved):
        return [_like(one, other) for one, other in zip(saved, live, strict=True)]
    return saved


class WeightAverage:
    """Exponential moving average of the weights, in `module`. Buffers are copied. Both modules are sharded alike."""

    def __init__(
        self, module: torch.nn.Module, *, live: torch.nn.Module, decay: float, every: int = 1
    ) -> None:
        self.module = module.requires_grad_(False)
        self.every = every
        self._weight = 1.0 - decay
        self._live = live
        self._pairs: tuple[list[torch.Tensor], ...] | None = None

    @torch.no_grad()
    def update(self) -> None:
        averages, values, kept, current = self._pairs or self._pair()
        torch._foreach_lerp_(averages, values, self._weight)
        if kept:
            torch._foreach_copy_(kept, current)

    def _pair(self) -> tuple[list[torch.Tensor], ...]:
        """(averages, averaged values, copies, copied values); the same tensors for a whole run."""
        live, live_buffers = dict(self._live.named_parameters()), dict(self._live.named_buffers())
        trained = {name: value for name, value in live.items() if value.requires_grad}
        averages = [_local(value) for name, value in self.module.named_parameters() if name in trained]
        values = [_local(value) for value in trained.values()]
        kept = [_local(value) for value in self.module.buffers()]
        current = [_local(live_buffers[name]) for name, _ in self.module.named_buffers()]
        pairs = averages, values, kept, current
        is_sharded = any(hasattr(value, "full_tensor") for value in live.values())
        self._pairs = None if is_sharded else pairs
        return pairs


def _local(value: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    to_local = getattr(value.detach(), "to_local", None)
    local: torch.Tensor = value.detach() if to_local is None else to_local()
    return local
