"""DropoutMlp with held-out data: its validation draws random numbers and would move the stream if it could."""

from typing import Any

import torch
from dropout_mlp import DropoutMlp

from gen_worker.trainer import Callback, RunHandle, StepContext


class EvaluatingMlp(DropoutMlp):
    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        x, y = batch
        assert not state["model"].training
        assert not torch.is_grad_enabled()
        torch.rand(7)
        errors = state["model"](x).squeeze(1) - y
        return {"loss": (errors**2).mean(), "rows_seen": 1.0, "y": y.mean()}

    test_step = validate_step


class Failing(Callback):
    def on_epoch_end(self, run: RunHandle) -> None:
        raise ValueError("this callback has had enough")
