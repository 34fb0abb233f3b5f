"""The trainer class of the demo: six methods, without code for files, processes or resume."""

from typing import Any

import torch
from torch import nn

from gen_worker.trainer import StepContext, StepResult, batch_to_torch, build_default_adamw_bundle

torch.set_num_threads(1)  # a small model is faster on one thread, and the order of sums is fixed


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 16, 16)),
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )


def to_input(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.to(torch.float32) / 255


class DigitTrainer:
    def setup(self, ctx: StepContext) -> None:
        pass  # nothing to fetch or open

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = build_model().to(ctx.device)
        optimizer, scheduler = build_default_adamw_bundle(model, ctx.job.hyperparams)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch, ["pixels", "label"])
        return to_input(columns["pixels"]).to(ctx.device), columns["label"].to(ctx.device)

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        images, labels = prepared_batch
        state["optimizer"].zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(state["model"](images), labels)
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, torch.Tensor]:
        """For requests and `trn predict`: one value a row and name. There are no labels."""
        images = to_input(batch_to_torch(rows, ["pixels"])["pixels"]).to(ctx.device)
        probability = state["model"](images).softmax(dim=1)
        return {"digit": probability.argmax(dim=1), "probability": probability}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])
