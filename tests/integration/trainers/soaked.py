"""A small network for the soak of a model server. The bits of a row depend on the batch shape; some rows do harm."""

import os
import signal
from typing import Any

import numpy as np
import torch

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

torch.set_num_threads(1)

WIDTH = 4
RAISES, RAISES_ONCE, KILLS, EXITS = 1001.0, 1002.0, 1003.0, 1004.0  # as the first value of a row


class Soaked:
    """`hyperparams.fault` makes versions that no gate may let through: raise, exit, columns."""

    label_columns = ("y",)

    def setup(self, ctx: StepContext) -> None:
        self.fault = ctx.job.hyperparams.get("fault", "")
        self.raised: set[float] = set()

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        torch.manual_seed(3)
        layers = [torch.nn.Linear(WIDTH, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Tanh()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(96, 1))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.02)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch)
        return columns["x"], columns["y"]

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        loss = self.loss(prepared_batch, state)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        return {"loss": self.loss(batch, state)}

    def loss(self, batch: Any, state: dict[str, Any]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(state["model"](x)[:, 0], y)

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        """`pid` is that of the process that answers."""
        x = batch_to_torch(rows, ["x"])["x"]
        self.misbehave(x.tolist())
        y = self.answer(x, state)
        return {"columns" if self.fault == "columns" else "y": y, "pid": np.full(len(y), os.getpid())}

    @staticmethod
    def answer(x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = state["model"](x)[:, 0]
        return found

    def misbehave(self, rows: list[list[float]]) -> None:
        if self.fault == "raise":
            raise ValueError("this version answers nothing")
        if self.fault == "exit":
            os._exit(3)
        for first, second, *_ in rows:
            if first == RAISES:
                raise ValueError("this row cannot be predicted")
            if first == RAISES_ONCE and second not in self.raised:
                self.raised.add(second)
                raise ValueError("not the first time that this process sees this row")
            if first == KILLS:
                os.kill(os.getpid(), signal.SIGKILL)
            if first == EXITS:
                os._exit(3)

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])
