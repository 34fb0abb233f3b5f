"""A small torch trainer that notes when its first step begins, and one that notes each step."""

import os
import time
from typing import Any

import torch

from daemon_trainers import note_time
from gen_worker.trainer import StepContext, StepResult

STEP_S = 0.005  # so that a checkpoint is done before the next is due


class FirstStep:
    """`hyperparams.clock` is the file for the note."""

    def setup(self, ctx: StepContext) -> None:
        self.clock: str | None = ctx.job.hyperparams["clock"]

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return make_state()

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return torch.full((8, 16), float(raw_batch))

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        if self.clock is not None:
            note_time(self.clock)
            self.clock = None
        return StepResult(metrics={"loss": step(batch, state)})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["model"].load_state_dict(payload["model"])
        state["optimizer"].load_state_dict(payload["optimizer"])


def make_state() -> dict[str, Any]:
    """A model of a few hundred weights and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def step(batch: torch.Tensor, state: dict[str, Any]) -> float:
    loss = state["model"](batch).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return float(loss.detach())


class Recovering(FirstStep):
    """Notes every step that it has committed: its process, its number, when."""

    def setup(self, ctx: StepContext) -> None:
        torch.set_num_threads(1)
        self.steps = Steps(ctx.job.hyperparams["clock"])

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        time.sleep(STEP_S)
        loss = step(batch, state)
        self.steps.note(ctx.step + 1)
        return StepResult(metrics={"loss": loss})


class Steps:
    """A file with a line for each step of any process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, number: int) -> None:
        os.write(self._fd, b"%d %d %d\n" % (os.getpid(), number, time.monotonic_ns()))
