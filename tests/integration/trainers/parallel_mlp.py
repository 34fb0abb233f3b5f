"""A model under DDP or FSDP2 whose gradient is the exact mean over the global batch, also where a rank has no rows."""

import os
import signal
from typing import Any

import torch

from gen_worker.trainer import StepContext, StepResult, batch_to_torch, distribute_module, global_rows

torch.set_num_threads(1)


class ParallelMlp:
    strategy = "ddp"
    handles_empty_shares = True

    def setup(self, ctx: StepContext) -> None:
        rank = int(os.environ.get("FAULT_RANK", "1"))
        self.fault = os.environ.get("FAULT") if ctx.rank == rank else None
        self.fault_step = int(os.environ.get("FAULT_AT_STEP", "0"))

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        dropout = float(ctx.job.hyperparams.get("dropout", 0.0))
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
        )
        self.net = distribute_module(model, ctx, strategy=self.strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return {"model": model, "optimizer": optimizer}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        tensors = batch_to_torch(raw_batch, ["x", "y"])
        return tensors["x"], tensors["y"], global_rows(raw_batch, ctx)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        x, y, rows = batch
        if ctx.step + 1 == self.fault_step:
            self._fail()
        state["optimizer"].zero_grad()
        errors = self.net(x).squeeze(1) - y
        # DDP averages over the ranks: their parts of the mean must add up to the mean of the whole batch.
        loss = (errors**2).sum() * ctx.world_size / rows
        loss.backward()
        state["optimizer"].step()
        own_mean = (errors.detach() ** 2).mean()
        return StepResult(metrics={"loss": own_mean, "y": y.mean()})

    def validate_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> dict[str, Any]:
        x, y, _ = batch
        return {"loss": ((self.net(x).squeeze(1) - y) ** 2).mean(), "y": y.mean()}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["model"].load_state_dict(payload["model"])
        state["optimizer"].load_state_dict(payload["optimizer"])

    def _fail(self) -> None:
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.fault == "raise":
            raise ValueError("the loss of this rank is not what it was")


class MeanLoss(ParallelMlp):
    """As most people write it: the mean of what is there, which is NaN where nothing is; and a penalty times it."""

    handles_empty_shares = False

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        x, y, _ = batch
        if len(x) == 0 and ctx.job.hyperparams.get("refuse"):
            raise ValueError("expected more than 0 values per channel")
        state["optimizer"].zero_grad()
        loss = torch.nn.functional.mse_loss(self.net(x).squeeze(1), y)
        penalty = sum(weight.square().sum() for weight in state["model"].parameters())
        (loss * (1 + 0.001 * penalty)).backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})


class PlainFsdp(ParallelMlp):
    """Sharded, with the plain `state_dict` and `load_state_dict` of module and optimizer."""

    strategy = "fsdp"


class AbortsAtExit(ParallelMlp):
    """Stands for what torch's threads do now and then when an interpreter is torn down."""

    def setup(self, ctx: StepContext) -> None:
        super().setup(ctx)
        globals()["left_behind"] = _Abort()


class _Abort:
    def __del__(self, abort: Any = os.abort) -> None:
        abort()
