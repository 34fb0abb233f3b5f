"""LoRA by hand: a frozen base model, trained low-rank adapters, and checkpoints with only the adapters."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gen_worker.trainer import (
    StepContext,
    StepResult,
    batch_to_torch,
    build_default_adamw_bundle,
    load_trainable_module_checkpoint,
    save_trainable_module_checkpoint,
)

torch.set_num_threads(1)  # a small model is faster on one thread, and the order of sums is fixed


class LoRA(nn.Module):
    """A frozen linear layer W and a trained correction of low rank: W x + alpha / rank * B A x."""

    def __init__(self, frozen: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))  # so training starts at the base model
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.scale * (x @ self.a.T @ self.b.T)


def add_adapters(model: nn.Module, *, rank: int, alpha: float) -> nn.Module:
    """Put an adapter around every linear layer, at any depth."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRA(child, rank=rank, alpha=alpha))
        else:
            add_adapters(child, rank=rank, alpha=alpha)
    return model


def build_base() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))


def load_base(path: Path) -> nn.Sequential:
    base = build_base()
    base.load_state_dict(torch.load(path, weights_only=True))
    return base.requires_grad_(False)


class LoRATrainer:
    def setup(self, ctx: StepContext) -> None:
        self.base = load_base(ctx.model_handles["weights"]).to(ctx.device)  # to compare with

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        settings = ctx.job.hyperparams
        model = load_base(ctx.model_handles["weights"])
        model = add_adapters(model, rank=settings["rank"], alpha=settings["alpha"]).to(ctx.device)
        optimizer, scheduler = build_default_adamw_bundle(model, settings)  # takes what has requires_grad
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch)
        return columns["motion"].to(ctx.device), columns["acceleration"].to(ctx.device)

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        motion, acceleration = prepared_batch
        loss = nn.functional.mse_loss(state["model"](motion).squeeze(1), acceleration)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        base_loss = nn.functional.mse_loss(self.base(motion).squeeze(1), acceleration)
        return StepResult(metrics={"loss": loss.detach(), "base_loss": base_loss})

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, torch.Tensor]:
        """For requests and `trn predict`: what the adapted model says, and the base model beside it."""
        motion = batch_to_torch(rows, ["motion"])["motion"].to(ctx.device)
        return {"acceleration": state["model"](motion).squeeze(1), "base": self.base(motion).squeeze(1)}

    def serving_state(self, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        """Without the optimizer and its memory."""
        return {"model": state["model"]}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Without the frozen base model, which comes from the job's `weights`."""
        adapter = {
            name: value.detach() for name, value in state["model"].named_parameters() if value.requires_grad
        }
        return {
            "adapter": adapter,
            "optimizer": state["optimizer"].state_dict(),
            "scheduler": state["scheduler"].state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["model"].load_state_dict(payload["adapter"], strict=False)
        state["optimizer"].load_state_dict(payload["optimizer"])
        state["scheduler"].load_state_dict(payload["scheduler"])

    def save_checkpoint(
        self, *, state: dict[str, Any], step: int, output_dir: str, final: bool, ctx: StepContext
    ) -> None:
        """The adapter as a separate file, for use with base.pt."""
        save_trainable_module_checkpoint(
            module=state["model"],
            optimizer=None,
            output_dir=output_dir,
            step=step,
            final=final,
            model_name_or_path="base.pt",
        )

    def load_checkpoint(
        self, *, state: dict[str, Any], checkpoint_dir: str, payload: dict[str, Any], ctx: StepContext
    ) -> None:
        """Refuses an adapter with another rank or other layers, and lists all differences."""
        load_trainable_module_checkpoint(module=state["model"], optimizer=None, checkpoint_dir=checkpoint_dir)
