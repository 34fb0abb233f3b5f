"""A linear model that can be served. `hyperparams` make versions of it fail in each way that a promotion can fail."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from gen_worker.trainer import StepContext, StepResult, batch_to_torch

torch.set_num_threads(1)


class Served:
    """y = x @ weight + bias. `bias` begins at the hyperparameter, so that answers show the version."""

    label_columns = ("y",)

    def setup(self, ctx: StepContext) -> None:
        self.settings = dict(ctx.job.hyperparams)

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(model.bias, self.settings.get("bias", 0.0))
        size = self.settings.get("ballast", 0)
        if size:
            model.register_buffer("ballast", torch.zeros(size, dtype=torch.uint8))
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=self.settings.get("lr", 0.01)),
        }

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch)
        return columns["x"], columns["y"]

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        x, y = prepared_batch
        loss = ((state["model"](x)[:, 0] - y) ** 2).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        x, y = batch
        return {"loss": ((state["model"](x)[:, 0] - y) ** 2).mean()}

    def predict(self, rows: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        fault = Path(self.settings["fault_file"]).read_text() if "fault_file" in self.settings else ""
        if fault == "raise":
            raise ValueError("predict went wrong")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(3)
        while fault == "hang":
            time.sleep(1)
        if fault == "wait":
            Path(f"{self.settings['fault_file']}.reached").touch()
        while fault == "wait":
            time.sleep(0.005)
            fault = Path(self.settings["fault_file"]).read_text()
        if fault == "slow":
            time.sleep(0.2)
        y = state["model"](batch_to_torch(rows, ["x"])["x"])[:, 0]
        return {self.settings.get("answer", "y"): y}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])


class Mute(Served):
    """Has no `predict`."""

    predict = None  # type: ignore[assignment]
