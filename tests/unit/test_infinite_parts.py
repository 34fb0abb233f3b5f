"""A mask of -inf is part of a sound state: its checkpoints are resumed. NaN and infinite weights never are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gen_worker.contract.checkpoints.choice import scan
from gen_worker.trainer import StepContext, StepResult, Trainer, TrainerConfig, TrainingJobSpec
from gen_worker.trainer.restore.infinite_parts import find_infinite_parts, is_infinite_part

INF = float("inf")


class Attention(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))


class Masked:
    """Adds to its weights; `spoil` says what becomes of which tensor at step 3."""

    spoil: tuple[str, float] | None = None

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"model": Attention(), "best": torch.tensor(INF), "lows": np.full(2, -INF)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        with torch.no_grad():
            state["model"].weight += 1
        if self.spoil is not None and ctx.step == 2:
            name, value = self.spoil
            (state["best"] if name == "best" else getattr(state["model"], name).detach()).fill_(value)
        return StepResult(metrics={"loss": 0.0})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "model": state["model"].state_dict()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state["model"].load_state_dict(payload["model"])
        state.update(best=payload["best"], lows=payload["lows"])


def train(folder: Path, trainer: Masked, max_steps: int) -> dict[str, Any]:
    config = TrainerConfig(max_steps=max_steps, checkpoint_every=1, metric_every=1)
    run = Trainer(trainer, config, train_data=[[1]] * 9, folder=folder)
    run.train()
    return run.model_state


def test_a_run_with_a_mask_of_infinities_resumes(tmp_path: Path) -> None:
    first = train(tmp_path, Masked(), 3)
    state = train(tmp_path, Masked(), 5)
    assert torch.equal(state["model"].weight, first["model"].weight + 2), "it went on, and did not begin anew"


@pytest.mark.parametrize(
    ("name", "value", "is_sound"),
    [
        ("best", 0.5, True),
        ("mask", INF, True),
        ("mask", float("nan"), False),
        ("best", float("nan"), False),
        ("weight", INF, False),
        ("bias", -INF, False),
    ],
)
def test_only_what_was_infinite_at_the_start_may_be_so_and_nothing_may_be_nan(
    tmp_path: Path, name: str, value: float, is_sound: bool
) -> None:
    trainer = Masked()
    trainer.spoil = (name, value)
    train(tmp_path, trainer, 3)
    found, _ = scan(tmp_path / "checkpoints")
    saved = {info.step: info.verified for info in found if info.step != 3 or info.final}
    assert saved[2] is True
    assert saved[3] is is_sound


def test_what_is_infinite_is_found_in_buffers_and_in_the_state_itself() -> None:
    state = Masked().configure(StepContext(job=TrainingJobSpec(run_id="any", max_steps=1)))
    frozen = torch.nn.Module()
    frozen.limit = torch.nn.Parameter(torch.tensor([INF]), requires_grad=False)
    frozen.weight = torch.nn.Parameter(torch.tensor([INF]))
    parts = find_infinite_parts({**state, "inner": [torch.nn.Sequential(Attention(), frozen)]}, object())
    assert parts == {"mask", "best", "lows", "0.mask", "1.limit"}
    assert find_infinite_parts({"w": torch.ones(2), "n": np.arange(3)}, object()) == frozenset()
    assert is_infinite_part("mask", parts)
    assert is_infinite_part("model.layers.mask", parts)
    assert not is_infinite_part("model.unmask", parts)
    assert not is_infinite_part("model.weight", parts)
