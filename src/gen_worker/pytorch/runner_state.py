"""What `configure` builds from a config: model, loss, optimizer, schedule and step."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gen_worker.errors import ModelLoadError, SpecError
from gen_worker.pytorch.config import RunnerConfig, SchedulerSpec
from gen_worker.pytorch.data.preparation import Preparation
from gen_worker.pytorch.model.build import build_model, freeze, shapes_in_words, try_model
from gen_worker.pytorch.model.losses import NEXT_TOKEN, Loss, build_loss
from gen_worker.pytorch.model.metrics import Evaluation, build_metrics
from gen_worker.pytorch.model.names import first_line
from gen_worker.pytorch.model.optimizers import (
    WARMUP_COSINE,
    Schedule,
    WeightAverage,
    build_optimizer,
    build_schedule,
)
from gen_worker.pytorch.step import Exchange, Step, StepParts, build_step
from gen_worker.trainer.author.hyperparams import RunLength, ScheduleLength
from gen_worker.trainer.contracts import StepContext
from gen_worker.trainer.restore.weights import load_weights

Forward = Callable[[Any], Any]
Select = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(slots=True, kw_only=True)
class RunnerState(StepParts):
    """`module` is the model without wrappers. `average`, if there is one, is evaluated instead."""

    prepare: Preparation
    evaluate: Forward
    metrics: dict[str, Any]
    select: Select | None
    classes: list[str] | None = None  # names of the target's numbers, if the data has them
    evaluation: Evaluation | None = None
    step: Step = field(init=False)

    @property
    def evaluated_module(self) -> torch.nn.Module:
        return self.module if self.average is None else self.average.module


def build_preparation(config: RunnerConfig, ctx: StepContext) -> Preparation:
    """InputError if the data does not have the columns."""
    is_next_token = config.loss_spec.name == NEXT_TOKEN
    return Preparation(config.columns, ctx, is_next_token=is_next_token, channels_last=config.channels_last)


def build_tried_parts(
    config: RunnerConfig, ctx: StepContext, prepare: Preparation, autocast: AbstractContextManager[Any]
) -> tuple[torch.nn.Module, Loss, dict[str, Any], Select | None]:
    """(model, loss, metrics, select), tested with rows of zeros."""
    module = build_model(config.model, seed=ctx.job.seed, row_shape=prepare.row_shape, device=str(ctx.device))
    loss = build_loss(config.loss_spec, device=torch.device(ctx.device), pad_id=prepare.pad_id)
    metrics = build_metrics(config.metric_specs, device=str(ctx.device))
    select = _select_tokens(prepare.pad_id) if config.loss_spec.name == NEXT_TOKEN else None
    forward = _forward(module, is_single=len(config.columns.inputs) == 1)
    _try(config, module, forward, loss, metrics, select, prepare, autocast)
    return module, loss, metrics, select


def build_state(config: RunnerConfig, ctx: StepContext) -> RunnerState:
    """Everything that a run of `config` needs. Finds all faults before the first step."""
    batch_size = ctx.job.dataset.batch_size if ctx.job.dataset is not None else None
    share = None if batch_size is None else batch_size // ctx.world_size
    if share is not None and config.gradient_accumulation > share:
        raise SpecError(
            f"the job of run {ctx.job.run_id}",
            [
                f"hyperparams.gradient_accumulation: found {config.gradient_accumulation}, but a step has only {share}"
                " rows in each process: increase dataset.batch_size, or decrease it"
            ],
        )
    device = torch.device(ctx.device)
    prepare = build_preparation(config, ctx)
    autocast = _autocast(ctx, device)
    module, loss, metrics, select = build_tried_parts(config, ctx, prepare, autocast)
    is_single = len(config.columns.inputs) == 1

    if config.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    weights = ctx.model_handles.get("weights")
    if weights is not None:
        load_weights(module, Path(weights), strict=config.weights_strict, part=config.weights_from)
    freeze(module, config.freeze)
    average = copy.deepcopy(module).eval() if config.ema is not None else None
    wrapped, exchange = _distribute(module, config, ctx)
    if average is not None and config.strategy == "fsdp":
        average, _ = _distribute(average, config, ctx)
    averaging = None
    if average is not None and config.ema is not None:
        averaging = WeightAverage(average, live=module, decay=config.ema.decay, every=config.ema.every)

    optimizer = build_optimizer(config.optimizer_spec, module, config.learning_rate)
    state = RunnerState(
        module=module,
        forward=_forward(_compiled(config, wrapped), is_single=is_single),
        loss=loss,
        optimizer=optimizer,
        scheduler=_schedule(config, optimizer, ctx),
        scaler=torch.amp.GradScaler(device.type) if ctx.job.precision == "fp16" else None,
        average=averaging,
        autocast=autocast,
        clip_norm=config.gradient_clip_norm,
        clip_value=config.gradient_clip_value,
        num_parts=config.gradient_accumulation,
        world_size=ctx.world_size,
        exchange=exchange,
        prepare=prepare,
        evaluate=_forward(module if averaging is None else averaging.module, is_single=is_single),
        metrics=metrics,
        select=select,
        classes=_classes(ctx),
    )
    state.step = build_step(state)
    return state


def _classes(ctx: StepContext) -> list[str] | None:
    """The class names of an image folder."""
    found = getattr(getattr(ctx.dataset, "dataset", None), "classes", None)
    return [str(name) for name in found] if isinstance(found, list | tuple) else None


def _forward(module: Callable[..., Any], *, is_single: bool) -> Forward:
    """One input is the model's first argument; several are passed by name."""
    return module if is_single else lambda inputs: module(**inputs)


def _autocast(ctx: StepContext, device: torch.device) -> AbstractContextManager[Any]:
    """Entered for every step; the weights stay fp32."""
    if ctx.job.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16 if ctx.job.precision == "bf16" else torch.float16)


def _try(
    config: RunnerConfig,
    module: torch.nn.Module,
    forward: Forward,
    loss: Loss,
    metrics: dict[str, Any],
    select: Select | None,
    prepare: Preparation,
    autocast: AbstractContextManager[Any],
) -> None:
    trial = prepare.trial()
    if trial is None:
        return  # the data has no schema: the first batch will be checked
    with autocast:
        output = try_model(module, forward, loss.mean, *trial, what=config.model.type)
    for name, metric in metrics.items():
        evaluation = Evaluation({name: metric}, select=select)
        try:
            evaluation.update(output, trial[1])
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            given = f"{shapes_in_words(output)} from the model and {shapes_in_words(trial[1])} as target"
            raise ModelLoadError(
                f"hyperparams.metrics.{name}: {type(metric).__name__} rejects {given}: {first_line(error)}"
            ) from error
        metric.reset()


def _select_tokens(pad_id: int | None) -> Select:
    def select(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, target = logits.flatten(0, 1), target.flatten()
        if pad_id is None:
            return logits, target
        kept = target != pad_id
        return logits[kept], target[kept]

    return select


def _distribute(
    module: torch.nn.Module, config: RunnerConfig, ctx: StepContext
) -> tuple[torch.nn.Module, Exchange]:
    """(the module to train with, a context that delays the gradient all-reduce until the last part of a window)."""
    if ctx.world_size == 1:
        return module, lambda _is_last: nullcontext()
    from gen_worker.trainer.processes.distributed import distribute_module

    wrapped: torch.nn.Module = distribute_module(module, strategy=config.strategy, ctx=ctx)
    no_sync = getattr(wrapped, "no_sync", None)
    if no_sync is not None:
        return wrapped, lambda is_last: nullcontext() if is_last else no_sync()

    def delay(is_last: bool) -> AbstractContextManager[None]:
        wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    return wrapped, delay


def _compiled(config: RunnerConfig, module: torch.nn.Module) -> Callable[..., Any]:
    """What training calls. Evaluation and checkpoints use the module itself, which keeps its parameter names.

    Shapes are static by default. With torch's default the kernels depend on the batches seen so far, so that a resumed
    run would round differently.
    """
    spec = config.compile_spec
    if spec is None:
        return module
    return torch.compile(
        module, mode=spec.mode, backend=spec.backend, dynamic=spec.dynamic, fullgraph=spec.fullgraph
    )


def _schedule(config: RunnerConfig, optimizer: torch.optim.Optimizer, ctx: StepContext) -> Schedule | None:
    spec = config.scheduler_spec
    if spec is None:
        return None
    per_epoch: int | None = getattr(ctx.dataset, "batches_per_epoch", None)
    total = ctx.total_steps
    steps_each = per_epoch if per_epoch and spec.every == "epoch" else 1
    if total is not None:
        total = math.ceil(total / steps_each)
    _note_length(spec, total, steps_each, ctx)
    return build_schedule(spec, optimizer, total_steps=total)


def _note_length(spec: SchedulerSpec, total: int | None, steps_each: int, ctx: StepContext) -> None:
    """For the runtime, which warns if a schedule ends before the run."""
    run_length: RunLength | None = getattr(ctx.job.hyperparams, "run_length", None)
    length = spec.args.get("total_steps", total)
    if run_length is None or spec.name != WARMUP_COSINE or length is None:
        return
    setting = "hyperparams.scheduler.args.total_steps" if "total_steps" in spec.args else None
    final = float(spec.args.get("min_lr_ratio", 0.0))
    run_length.schedules.append(ScheduleLength(length * steps_each, final, setting))
