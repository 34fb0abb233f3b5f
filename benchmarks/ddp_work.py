"""The author's class of the benchmark of several processes: the model and optimizer of `ddp_hand`, in six hooks."""

from typing import Any

import torch
from torch.nn import functional

from ddp_hand import build_model, build_optimizer
from gen_worker.trainer import StepContext, StepResult, batch_to_torch
from gen_worker.trainer.processes.distributed import distribute_module
from stretches import Stretches


class MlpTrainer:
    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)
        self._stretches: Stretches | None = None

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = build_model()
        wrapped = distribute_module(model, ctx)
        return {"model": model, "wrapped": wrapped, "optimizer": build_optimizer(model)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        columns = batch_to_torch(raw_batch)
        return columns["x"], columns["label"]

    def train_step(self, prepared_batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        if ctx.rank == 0:
            if self._stretches is None:
                self._stretches = Stretches()
            self._stretches.tick()
        x, label = prepared_batch
        optimizer = state["optimizer"]
        optimizer.zero_grad()
        loss = functional.cross_entropy(state["wrapped"](x), label)
        loss.backward()
        optimizer.step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: state[name].state_dict() for name in ("model", "optimizer")}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in payload.items():
            state[name].load_state_dict(part)
