"""A small network that follows a function which changes while it answers. The six hooks, and `predict`."""

from typing import Any

import torch
from torch import nn

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

torch.set_num_threads(1)


class DriftTrainer:
    label_columns = ("y",)  # what requests do not have, and feedback brings

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=ctx.job.hyperparams["learning_rate"])
        return {"model": model.to(ctx.device), "optimizer": optimizer}

    def prepare_batch(
        self, raw_batch: Any, state: dict[str, Any], ctx: StepContext
    ) -> dict[str, torch.Tensor]:
        return batch_to_torch(raw_batch, ["x", "y"])

    def train_step(
        self, prepared_batch: dict[str, torch.Tensor], state: dict[str, Any], ctx: StepContext
    ) -> StepResult:
        loss = nn.functional.mse_loss(state["model"](prepared_batch["x"])[:, 0], prepared_batch["y"])
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, torch.Tensor]:
        return {"y": state["model"](batch_to_torch(rows, ["x"])["x"])[:, 0]}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])
