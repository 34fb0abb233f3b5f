"""The author's state: made by `setup` and `configure`, and filled again where a run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen_worker.trainer.checkpoints.store import Checkpoint
from gen_worker.trainer.contracts import StepContext, TrainerPlugin

_HOW_TO_SHARD = (
    "a plain load_state_dict cannot shard the whole tensors of a checkpoint: use set_model_state_dict and"
    " set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, as docs/distributed.md shows, or resume with"
    " one process"
)


def prepare_state(
    trainer: TrainerPlugin,
    ctx: StepContext,
    *,
    payload: Mapping[str, Any] | None = None,
    checkpoint_dir: Path | str | None = None,
    author_payload: Mapping[str, Any] | None = None,
) -> Any:
    """`setup`, `configure`, and where there is something to resume from, `load_state_dict` and `load_checkpoint`."""
    trainer.setup(ctx)
    state = trainer.configure(ctx)
    _bind_optimizer(ctx, state)
    fill_state(
        trainer, state, ctx, payload=payload, checkpoint_dir=checkpoint_dir, author_payload=author_payload
    )
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
    """Put back what was saved, into a state that `configure` made."""
    if payload is not None:
        try:
            trainer.load_state_dict(state, dict(payload), ctx)
        except RuntimeError as fault:
            if "DTensor" in str(fault):
                fault.add_note(_HOW_TO_SHARD)
            raise
    hook = getattr(trainer, "load_checkpoint", None)
    if hook is not None and checkpoint_dir is not None:  # where its `save_checkpoint` left something
        hook(state=state, checkpoint_dir=str(checkpoint_dir), payload=dict(author_payload or {}), ctx=ctx)


def fill_from_checkpoint(
    trainer: TrainerPlugin, state: Any, ctx: StepContext, checkpoint: Checkpoint
) -> None:
    """`fill_state`, with everything that a checkpoint has for it."""
    folder = checkpoint.author_files
    if folder is None and checkpoint.author_payload is not None:
        folder = checkpoint.path.parent  # there was only a payload
    fill_state(
        trainer,
        state,
        ctx,
        payload=checkpoint.state,
        checkpoint_dir=folder,
        author_payload=checkpoint.author_payload,
    )


def _bind_optimizer(ctx: StepContext, state: Any) -> None:
    """Let `ctx.optimizer` and `ctx.scheduler` be what `configure` made, where it names them so."""
    for name in ("optimizer", "scheduler"):
        if getattr(ctx, name) is None:
            found = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
            object.__setattr__(ctx, name, found)
