"""The default schedule has the length of the run; a learning rate of 0 while steps remain is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gen_worker.trainer import StepContext, StepResult, Trainer, TrainerConfig, build_default_adamw_bundle
from gen_worker.trainer.compute.schedule import warmup_cosine_factor

BATCHES = [torch.full((1, 2), 0.1 * (n + 1)) for n in range(5)]
Rates = list[float]


class Fit:
    rates: Rates

    def setup(self, ctx: StepContext) -> None:
        self.rates = []

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
        optimizer, scheduler = build_default_adamw_bundle(model, ctx.job.hyperparams)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        self.rates.append(state["optimizer"].param_groups[0]["lr"])
        state["optimizer"].zero_grad()
        loss = state["model"](batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])


def train(folder: Path, plugin: Fit | None = None, **config: Any) -> tuple[Rates, Any]:
    plugin = plugin or Fit()
    settings = {"metric_every": 1, "learning_rate": 1.0, **config}
    trainer = Trainer(plugin, TrainerConfig(**settings), train_data=BATCHES, folder=folder)
    trainer.train()
    return plugin.rates, trainer.model_state


def said(folder: Path, level: str) -> list[str]:
    lines = (folder / "metrics" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["message"] for event in events if event["event"] == "log" and event["level"] == level]


def cosine(total: int) -> Rates:
    return [warmup_cosine_factor(0, total, 0.0)(step) for step in range(total)]


@pytest.mark.parametrize(("config", "total"), [({"max_steps": 8}, 8), ({"epochs": 2}, 10), ({"epochs": 2, "max_steps": 7}, 7)])  # fmt: skip
def test_its_length_is_that_of_the_run(tmp_path: Path, config: dict[str, Any], total: int) -> None:
    rates, _ = train(tmp_path, **config)
    assert rates == cosine(total)
    assert said(tmp_path, "warning") == []


def test_a_length_that_is_given_wins(tmp_path: Path) -> None:
    rates, _ = train(tmp_path, max_steps=4, hyperparams={"total_steps": 20})
    assert rates == cosine(20)[:4]


def test_a_warm_up_longer_than_the_run_is_a_warm_up(tmp_path: Path) -> None:
    rates, _ = train(tmp_path, max_steps=2, hyperparams={"warmup_steps": 10})
    assert rates == [0.1, 0.2]


def test_extending_a_run_extends_it_and_says_how(tmp_path: Path) -> None:
    train(tmp_path, max_steps=6)
    rates, _ = train(tmp_path, max_steps=10)
    assert rates == cosine(10)[6:]
    assert min(rates) > 0
    expected = f"schedule: 6 → 10 steps; learning rate continues at {cosine(10)[6]:.6g}"
    assert expected in said(tmp_path, "info")


def test_a_run_in_two_halves_is_the_whole_run_to_the_bit(tmp_path: Path) -> None:
    class Stops(Fit):
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            if ctx.step == 4 and not list(tmp_path.glob("halves/checkpoints/*.meta.json")):
                ctx.is_canceled.request("cancelled by the test")
            return super().train_step(batch, state, ctx)

    _, whole = train(tmp_path / "whole", max_steps=9)
    with pytest.raises(Exception, match="cancelled by the test"):
        train(tmp_path / "halves", Stops(), max_steps=9)
    rates, halves = train(tmp_path / "halves", Stops(), max_steps=9)
    assert rates == cosine(9)[5:]
    assert torch.equal(halves["model"].weight, whole["model"].weight)


def test_a_given_length_that_ends_before_the_run_is_told_at_the_start(tmp_path: Path) -> None:
    train(tmp_path, max_steps=3, hyperparams={"total_steps": 3})
    rates, _ = train(tmp_path, max_steps=8, hyperparams={"total_steps": 3})
    assert rates == [0.0] * 5
    (told,) = [line for line in said(tmp_path, "warning") if "learning rate" in line and "0" in line and "job changed" not in line]  # fmt: skip
    assert told.startswith("the learning rate is 0 from step 3 on: hyperparams.total_steps is 3")
    assert "Set hyperparams.total_steps to 8, or leave it out" in told


def test_a_rate_that_falls_to_zero_is_told_once_when_it_does(tmp_path: Path) -> None:
    class Cooling(Fit):
        def configure(self, ctx: StepContext) -> dict[str, Any]:
            state = super().configure(ctx)
            factor = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: max(0, 3 - step))
            return {**state, "scheduler": factor}

    train(tmp_path, Cooling(), max_steps=10)
    (told,) = said(tmp_path, "warning")
    assert told.startswith("the learning rate has been 0 since step 3 or earlier (now at step 4 of 10)")


def test_a_warm_up_from_zero_is_no_alarm(tmp_path: Path) -> None:
    class Warming(Fit):
        def configure(self, ctx: StepContext) -> dict[str, Any]:
            state = super().configure(ctx)
            factor = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: max(0.0, step - 1.0))
            return {**state, "scheduler": factor}

    train(tmp_path, Warming(), max_steps=6)
    assert said(tmp_path, "warning") == []


def test_a_context_says_how_long_the_run_is(tmp_path: Path) -> None:
    seen: list[int | None] = []

    class Asks(Fit):
        def configure(self, ctx: StepContext) -> dict[str, Any]:
            seen.append(ctx.total_steps)
            return super().configure(ctx)

    train(tmp_path, Asks(), epochs=3)
    train(tmp_path, Asks(), epochs=4)
    assert seen == [15, 20]
