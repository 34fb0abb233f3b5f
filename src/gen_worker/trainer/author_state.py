"""The author's state: made by `setup` and `configure`, and filled again where a run goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen_worker.trainer.contracts import StepContext, TrainerPlugin


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
    if payload is not None:
        trainer.load_state_dict(state, dict(payload), ctx)
    hook = getattr(trainer, "load_checkpoint", None)
    if hook is not None and checkpoint_dir is not None:  # where its `save_checkpoint` left something
        hook(state=state, checkpoint_dir=str(checkpoint_dir), payload=dict(author_payload or {}), ctx=ctx)
    return state


def _bind_optimizer(ctx: StepContext, state: Any) -> None:
    """Let `ctx.optimizer` and `ctx.scheduler` be what `configure` made, where it names them so."""
    for name in ("optimizer", "scheduler"):
        if getattr(ctx, name) is None:
            found = state.get(name) if isinstance(state, Mapping) else getattr(state, name, None)
            object.__setattr__(ctx, name, found)
