"""Plain torch: classify points on three spiral arms. The six hooks, and `validate_step`."""

from typing import Any

import torch
from torch import nn

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

torch.set_num_threads(1)  # a small model is faster on one thread, and the order of sums is fixed


class SpiralTrainer:
    def setup(self, ctx: StepContext) -> None:
        self.settings = ctx.job.hyperparams

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        width = self.settings["width"]
        model = nn.Sequential(
            nn.Linear(2, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(self.settings["dropout"]),
            nn.Linear(width, 3),
        ).to(ctx.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=self.settings["learning_rate"])
        return {"model": model, "optimizer": optimizer}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch)
        return columns["point"].to(ctx.device), columns["arm"].to(ctx.device)

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        points, arms = prepared_batch
        loss = nn.functional.cross_entropy(state["model"](points), arms)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, torch.Tensor]:
        """`batch` went through `prepare_batch`; the model is in eval mode, and gradients are off.

        What we return is averaged over all rows and reported as `val/loss` and `val/accuracy`.
        """
        points, arms = batch
        logits = state["model"](points)
        accuracy = (logits.argmax(dim=1) == arms).float().mean()
        return {"loss": nn.functional.cross_entropy(logits, arms), "accuracy": accuracy}

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, torch.Tensor]:
        """For requests and `trn predict`: `rows` has the column `point` alone; one value a row and name."""
        probability = state["model"](batch_to_torch(rows, ["point"])["point"].to(ctx.device)).softmax(dim=1)
        return {"arm": probability.argmax(dim=1), "probability": probability}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])
