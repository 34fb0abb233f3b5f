"""The author's state: made by `setup` and `configure`, loaded on a resume, saved and sampled by its hooks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen_worker.errors import TrainStepError
from gen_worker.trainer.attempt.failure import add_note, say
from gen_worker.trainer.author.state_parts import find_parts, is_optimizer
from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import SampleRequest, StepContext, TrainerPlugin

_HOW_TO_SHARD = (
    "a plain load_state_dict cannot shard the tensors of a checkpoint: use set_model_state_dict and"
    " set_optimizer_state_dict of torch.distributed.checkpoint.state_dict (see docs/distributed.md), or resume with one"
    " process"
)


def prepare_state(trainer: TrainerPlugin, ctx: StepContext) -> Any:
    """`setup` and `configure`."""
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    _bind_optimizer(ctx, state)
    return state


def fill_state(
    trainer: TrainerPlugin,
    state: Any,
    ctx: StepContext,
    *,
    payload: Mapping[str, Any] | None,
    checkpoint_dir: Path | str | None = None,
    author_payload: Mapping[str, Any] | None = None,
) -> None:
    """Load what was saved into a state that `configure` made."""
    if payload is not None:
        try:
            trainer.load_state_dict(state, dict(payload), ctx)
        except RuntimeError as fault:
            if "DTensor" in say(fault):
                add_note(fault, _HOW_TO_SHARD)
            raise
    hook = getattr(trainer, "load_checkpoint", None)
    if hook is not None and checkpoint_dir is not None:
        hook(state=state, checkpoint_dir=str(checkpoint_dir), payload=dict(author_payload or {}), ctx=ctx)


def fill_from_checkpoint(
    trainer: TrainerPlugin, state: Any, ctx: StepContext, checkpoint: Checkpoint
) -> None:
    """`fill_state` from a checkpoint."""
    folder = checkpoint.author_files
    if folder is None and checkpoint.author_payload is not None:
        folder = checkpoint.path.parent  # the hook returned a payload and wrote no files
    fill_state(
        trainer,
        state,
        ctx,
        payload=checkpoint.state,
        checkpoint_dir=folder,
        author_payload=checkpoint.author_payload,
    )


def save_author_files(
    trainer: TrainerPlugin, state: Any, ctx: StepContext, *, step: int, final: bool, folder: Path
) -> Mapping[str, Any] | None:
    """Call `save_checkpoint`; returns its payload."""
    payload = trainer.save_checkpoint(  # type: ignore[attr-defined]  # the caller found the hook
        state=state, step=step, output_dir=str(folder), final=final, ctx=ctx
    )
    if payload is not None and not isinstance(payload, Mapping):
        raise TrainStepError(f"save_checkpoint returned {type(payload).__name__}, expected a dict or None")
    return payload


def ask_for_samples(trainer: TrainerPlugin, state: Any, ctx: StepContext, *, step: int, folder: Path) -> None:
    """Call `sample`, if the class has it."""
    hook = getattr(trainer, "sample", None)
    if hook is not None:
        request = SampleRequest(prompts=tuple(ctx.job.sample_prompts), seed=ctx.job.sample_seed)
        hook(state=state, step=step, request=request, output_dir=str(folder), ctx=ctx)


def _bind_optimizer(ctx: StepContext, state: Any) -> None:
    """Set `ctx.optimizer` and `ctx.scheduler` to what `configure` made: by these names, or the only optimizer."""
    for name in ("optimizer", "scheduler"):
        if getattr(ctx, name) is None:
            found = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
            object.__setattr__(ctx, name, found)
    if ctx.optimizer is None:
        optimizers = [found for _, found in find_parts(is_optimizer, {"state": state})]
        if len(optimizers) == 1:
            object.__setattr__(ctx, "optimizer", optimizers[0])
