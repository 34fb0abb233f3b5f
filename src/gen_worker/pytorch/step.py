"""One optimizer step, as a closure that does the same as a hand-written loop.

The rows of a step are a window over micro-batches and processes. The gradient is that of the mean over the window: each
part is weighted by its rows (or tokens). So a short last batch, the number of parts and of processes do not change it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gen_worker.pytorch.model.losses import Loss
from gen_worker.pytorch.model.optimizers import Schedule, WeightAverage
from gen_worker.trainer.contracts import StepContext, StepResult

# (inputs, target, rows here, rows over all processes)
Prepared = tuple[Any, Any, int, int]
Step = Callable[[Prepared, StepContext], StepResult]
# Entered around the forward and backward of a part. True for the last one: gradients are then all-reduced.
Exchange = Callable[[bool], AbstractContextManager[Any]]

# Two, because batch norm rejects a single row.
_NUM_STAND_IN_ROWS = 2


@dataclass(slots=True, kw_only=True)
class StepParts:
    module: torch.nn.Module
    forward: Callable[[Any], Any]
    loss: Loss
    optimizer: torch.optim.Optimizer
    scheduler: Schedule | None = None
    scaler: torch.amp.GradScaler | None = None
    average: WeightAverage | None = None
    autocast: AbstractContextManager[Any] = field(default_factory=nullcontext)
    clip_norm: float | None = None
    clip_value: float | None = None
    num_parts: int = 1
    world_size: int = 1
    exchange: Exchange = lambda _is_last: nullcontext()


def build_step(parts: StepParts) -> Step:
    """The function that `train_step` calls."""
    if parts.num_parts == 1 and parts.world_size == 1:
        return _whole_batch_step(parts)
    return _window_step(parts)


def _whole_batch_step(parts: StepParts) -> Step:
    forward, mean, autocast = parts.forward, parts.loss.mean, parts.autocast
    zero_grad, backward, apply = parts.optimizer.zero_grad, _backward(parts), _apply(parts)
    follow_epoch = _follow_epoch(parts)

    def step(prepared: Prepared, ctx: StepContext) -> StepResult:
        if follow_epoch is not None:
            follow_epoch(ctx.epoch)
        zero_grad()
        with autocast:
            loss = mean(forward(prepared[0]), prepared[1])
        backward(loss)
        apply(ctx)
        return StepResult(metrics={"loss": loss.detach()})

    return step


def _window_step(parts: StepParts) -> Step:
    forward, loss, autocast = parts.forward, parts.loss, parts.autocast
    zero_grad, backward, apply = parts.optimizer.zero_grad, _backward(parts), _apply(parts)
    follow_epoch = _follow_epoch(parts)
    num_parts, world_size, exchange = parts.num_parts, parts.world_size, parts.exchange
    mean, total, count = loss.mean, loss.total, loss.count

    def step(prepared: Prepared, ctx: StepContext) -> StepResult:
        if follow_epoch is not None:
            follow_epoch(ctx.epoch)
        inputs, target, rows, all_rows = prepared
        zero_grad()
        share = None
        if count is not None:
            denominator = count(target) if rows else torch.zeros((), device=_device_of(target))
            if world_size > 1:
                torch.distributed.all_reduce(denominator)
            share = world_size / torch.where(denominator > 0, denominator, 1.0)  # only padding: 0 / 1
        windows = _split(inputs, target, rows, num_parts, keep_empty=world_size > 1)
        summed: Any = 0.0
        for index, (some_inputs, some_target, some_rows) in enumerate(windows):
            kept = nullcontext() if some_rows else _kept_buffers(parts.module)
            with kept, exchange(index == len(windows) - 1):
                with autocast:
                    output = forward(some_inputs)
                    if some_rows == 0:
                        part = mean(output, some_target).nan_to_num() * 0.0
                    elif share is not None and total is not None:
                        part = total(output, some_target) * share
                    else:
                        part = mean(output, some_target) * (some_rows * world_size / all_rows)
                backward(part)
            summed = summed + part.detach()
        apply(ctx)
        # The mean over processes, weighted by their rows, is that of the window.
        return StepResult(metrics={"loss": summed * (all_rows / (world_size * rows)) if rows else 0.0})

    return step


def _follow_epoch(parts: StepParts) -> Callable[[int], None] | None:
    schedule = parts.scheduler
    return schedule.follow_epoch if schedule is not None and schedule.is_by_epoch else None


def _backward(parts: StepParts) -> Callable[[torch.Tensor], None]:
    scaler = parts.scaler
    if scaler is None:
        return torch.Tensor.backward
    # First steps that overflow are skipped; torch would warn that the schedule is ahead of the optimizer.
    parts.optimizer._opt_called = True  # type: ignore[attr-defined]

    def backward(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    return backward


def _apply(parts: StepParts) -> Callable[[StepContext], None]:
    """Clip, step, schedule, average."""
    optimizer, scaler, average = parts.optimizer, parts.scaler, parts.average
    clip_norm, clip_value = parts.clip_norm, parts.clip_value
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    schedule = parts.scheduler
    next_rate = None if schedule is None or schedule.is_by_epoch else schedule.scheduler.step

    def apply(ctx: StepContext) -> None:
        if scaler is not None and (clip_norm is not None or clip_value is not None):
            scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if next_rate is not None:
            next_rate()
        if average is not None and (ctx.step + 1) % average.every == 0:
            average.update()

    return apply


def _split(
    inputs: Any, target: Any, rows: int, num_parts: int, *, keep_empty: bool
) -> list[tuple[Any, Any, int]]:
    """The parts of a window with their number of rows, equal except for the last ones.

    With `keep_empty` there are always `num_parts`, because every process takes part in each all-reduce. Empty parts
    get rows of zeros that do not count.
    """
    size = -(-rows // num_parts) if rows else 0
    found = []
    for number in range(num_parts):
        start = min(number * size, rows)
        stop = min(start + size, rows)
        if stop > start:
            part = slice(start, stop)
            found.append((_take(inputs, part), _take(target, part), stop - start))
        elif keep_empty:
            found.append((stand_in(inputs), stand_in(target), 0))
    return found


def _take(value: Any, part: slice) -> Any:
    return {name: item[part] for name, item in value.items()} if isinstance(value, Mapping) else value[part]


def stand_in(value: Any) -> Any:
    """Rows of zeros with the shapes and types of `value`, which may have no rows."""
    if isinstance(value, Mapping):
        return {name: stand_in(item) for name, item in value.items()}
    return value.new_zeros((_NUM_STAND_IN_ROWS, *value.shape[1:]))


def _device_of(value: Any) -> torch.device:
    first: torch.Tensor = next(iter(value.values())) if isinstance(value, Mapping) else value
    return first.device


@contextmanager
def _kept_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Restore running statistics: rows of zeros are not data."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
