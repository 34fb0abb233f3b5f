"""A small torch model whose every step depends on the data's order and on all three random streams."""

import os
import random
import signal
from typing import Any

import numpy as np
import torch

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

torch.set_num_threads(1)


class DropoutMlp:
    def setup(self, ctx: StepContext) -> None:
        self.kill_at = int(os.environ.get("KILL_AT_STEP", "0"))
        self.term_at = int(os.environ.get("TERM_AT_STEP", "0"))

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rows": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        tensors = batch_to_torch(raw_batch, ["x", "y"])
        noise = torch.from_numpy(np.random.standard_normal(tensors["x"].shape).astype("float32")) * 0.01
        return tensors["x"] + noise + random.random() * 0.001, tensors["y"]

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        if ctx.step + 1 == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.step + 1 == self.term_at:
            os.kill(os.getpid(), signal.SIGTERM)
        x, y = batch
        state["optimizer"].zero_grad()
        loss = torch.nn.functional.mse_loss(state["model"](x).squeeze(1), y)
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["rows"] += len(y)
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": state["model"].state_dict(),
            "optimizer": state["optimizer"].state_dict(),
            "scheduler": state["scheduler"].state_dict(),
            "rows": state["rows"],
        }

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for part in ("model", "optimizer", "scheduler"):
            state[part].load_state_dict(payload[part])
        state["rows"] = payload["rows"]
