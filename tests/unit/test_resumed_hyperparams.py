"""A resume with a changed hyperparameter trains with it, or is refused; without a change it is to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sealed_meta import sealed

from gen_worker.errors import InputError
from gen_worker.trainer import StepContext, StepResult, Trainer, TrainerConfig, build_default_adamw_bundle
from gen_worker.trainer.restore.optimizer_options import ConfiguredOptions
from gen_worker.trainer.restore.resumed_hyperparams import KEPT_OPTIONS, Resumption

FIRST, LAST = 6, 14
BATCHES = [torch.full((2, 3), 0.1 * (n + 1)) for n in range(LAST)]
Build = Callable[[torch.nn.Module, dict[str, Any]], tuple[Any, Any]]


class Fit:
    """A linear model; a subclass says what its optimizer and schedule are."""

    build: Build

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        torch.manual_seed(3)
        model = torch.nn.Linear(3, 1)
        optimizer, scheduler = type(self).build(model, ctx.job.hyperparams)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return raw_batch

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["optimizer"].zero_grad()
        loss = (state["model"](batch) - 1).square().mean()
        loss.backward()
        state["optimizer"].step()
        if "scheduler" in state:
            plateau = isinstance(state["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
            state["scheduler"].step(*([1.0] if plateau else []))
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])


def sgd(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    options = {
        "lr": hp["lr"],
        "momentum": hp.get("momentum", 0.9),
        "weight_decay": hp.get("weight_decay", 0.0),
    }
    return torch.optim.SGD(model.parameters(), **options), None


def step_lr(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    optimizer, _ = sgd(model, hp)
    return optimizer, torch.optim.lr_scheduler.StepLR(
        optimizer, hp.get("every", 2), gamma=hp.get("gamma", 0.5)
    )


def sequence(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    optimizer, _ = sgd(model, hp)
    rates = torch.optim.lr_scheduler
    parts: list[Any] = [
        rates.LinearLR(optimizer, 0.1, total_iters=3),
        rates.CosineAnnealingLR(optimizer, hp.get("length", 10)),
    ]
    return optimizer, rates.SequentialLR(optimizer, parts, milestones=[3])


def one_cycle(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    optimizer, _ = sgd(model, {"lr": 0.1})
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, hp["peak"], total_steps=20)


def plateau(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    optimizer, _ = sgd(model, hp)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def adamw(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
    return build_default_adamw_bundle(model, hp)


def kind_of(build: Build) -> type[Fit]:
    return type("Fit", (Fit,), {"build": staticmethod(build)})


def trainer(folder: Path, plugin: Any, hyperparams: dict[str, Any], steps: int, **config: Any) -> Trainer:
    settings = TrainerConfig(
        max_steps=steps, metric_every=1, checkpoint_every=0, hyperparams=hyperparams, **config
    )
    data = BATCHES if not issubclass(plugin, Own) else [[float(n)] for n in range(LAST)]
    return Trainer(plugin, settings, train_data=data, folder=folder)


def in_two_parts(
    folder: Path, plugin: Any, first: dict[str, Any], then: dict[str, Any], steps: int = LAST, **config: Any
) -> Any:
    """The state at the end, of a run that was changed after its first steps."""
    trainer(folder, plugin, first, FIRST).train()
    again = trainer(folder, plugin, then, steps, **config)
    again.train()
    return again.model_state


def by_hand(build: Build, first: dict[str, Any], then: dict[str, Any], *, steps: int = LAST) -> torch.Tensor:
    """The same in a loop without us: from the change on, the options that a run with them alone has at that step."""
    fit = kind_of(build)()
    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1)
    optimizer, scheduler = build(model, first)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if scheduler is not None:
        state["scheduler"] = scheduler
    for step in range(steps):
        if step == FIRST:
            other, rates = build(torch.nn.Linear(3, 1), then)
            for _ in range(FIRST):
                other.step()
                if rates is not None:
                    rates.step()
            for group, now in zip(optimizer.param_groups, other.param_groups, strict=True):
                group.update({key: value for key, value in now.items() if key != "params"})
            if rates is not None:
                rates.optimizer = optimizer
                for part in getattr(rates, "_schedulers", []):
                    part.optimizer = optimizer
                state["scheduler"] = rates
        fit.train_step(BATCHES[step], state, None)  # type: ignore[arg-type]
    weight: torch.Tensor = model.weight
    return weight


CHANGES: dict[str, tuple[Build, dict[str, Any], dict[str, Any]]] = {
    "learning rate": (sgd, {"lr": 0.1}, {"lr": 0.01}),
    "weight decay": (sgd, {"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5}),
    "momentum": (sgd, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.1}),
    "learning rate below StepLR": (step_lr, {"lr": 0.1}, {"lr": 0.01}),
    "gamma of StepLR": (step_lr, {"lr": 0.1}, {"lr": 0.1, "gamma": 0.9}),
    "step size of StepLR": (step_lr, {"lr": 0.1}, {"lr": 0.1, "every": 5}),
    "learning rate below a sequence": (sequence, {"lr": 0.1}, {"lr": 0.02}),
    "length of a part of a sequence": (sequence, {"lr": 0.1}, {"lr": 0.1, "length": 20}),
    "peak of OneCycleLR": (one_cycle, {"peak": 0.1}, {"peak": 0.3}),
    "learning rate of the bundle": (adamw, {"lr": 0.1, "total_steps": 20}, {"lr": 0.01, "total_steps": 20}),
    "weight decay of the bundle": (adamw, {"lr": 0.1, "total_steps": 20}, {"lr": 0.1, "total_steps": 20, "weight_decay": 0.5}),
    "betas of the bundle": (adamw, {"lr": 0.1, "total_steps": 20}, {"lr": 0.1, "total_steps": 20, "betas": [0.5, 0.9]}),
    "warm-up of the bundle": (adamw, {"lr": 0.1, "total_steps": 20}, {"lr": 0.1, "total_steps": 20, "warmup_steps": 9}),
    "length of the bundle's schedule": (adamw, {"lr": 0.1, "total_steps": 9}, {"lr": 0.1, "total_steps": 30}),
    "floor of the bundle's schedule": (adamw, {"lr": 0.1, "total_steps": 9}, {"lr": 0.1, "total_steps": 9, "min_lr_ratio": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_option_takes_effect_as_in_a_loop_by_hand(tmp_path: Path, name: str) -> None:
    build, first, then = CHANGES[name]
    plugin = kind_of(build)
    changed = in_two_parts(tmp_path / "changed", plugin, first, then)["model"].weight
    kept = in_two_parts(tmp_path / "kept", plugin, first, first)["model"].weight
    assert not torch.equal(changed, kept)
    assert torch.equal(kept, by_hand(build, first, first))
    assert torch.equal(changed, by_hand(build, first, then))


# An older checkpoint does not say what a default was, nor how an option follows from a hyperparameter.
JUDGED = [
    name
    for name, (build, first, then) in CHANGES.items()
    if set(first) == set(then) and build is not one_cycle
]


@pytest.mark.parametrize("name", JUDGED)
def test_a_checkpoint_without_the_kept_options_is_judged_by_the_changed_value(
    tmp_path: Path, name: str
) -> None:
    build, first, then = CHANGES[name]
    plugin = kind_of(build)
    trainer(tmp_path, plugin, first, FIRST).train()
    forget_options(tmp_path)
    again = trainer(tmp_path, plugin, then, LAST)
    again.train()
    assert torch.equal(again.model_state["model"].weight, by_hand(build, first, then))


def forget_options(folder: Path) -> None:
    """As a release before this one wrote it."""
    path = folder / "checkpoints" / "final.meta.json"
    document = json.loads(path.read_text())
    assert document["loop"].pop(KEPT_OPTIONS)
    path.write_bytes(sealed(document))


def test_a_metric_driven_schedule_keeps_how_far_it_had_come(tmp_path: Path) -> None:
    plugin = kind_of(plateau)
    trainer(tmp_path, plugin, {"lr": 0.1}, FIRST).train()
    again = trainer(tmp_path, plugin, {"lr": 0.01}, FIRST + 1)
    again.train()
    # Of seven equal measurements, every second one after the first exhausted its patience.
    assert again.model_state["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**3)


def test_a_rate_that_the_class_moves_by_hand_is_scaled(tmp_path: Path) -> None:
    class Decaying(kind_of(sgd)):  # type: ignore[misc]
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            state["optimizer"].param_groups[0]["lr"] *= 0.5
            result: StepResult = super().train_step(batch, state, ctx)
            return result

    trainer(tmp_path, Decaying, {"lr": 0.1}, 2).train()
    again = trainer(tmp_path, Decaying, {"lr": 0.2}, 3)
    again.train()
    assert again.model_state["optimizer"].param_groups[0]["lr"] == pytest.approx(0.2 * 0.5**3)


def test_a_resume_without_a_change_of_options_touches_none(tmp_path: Path) -> None:
    class Moving(kind_of(sgd)):  # type: ignore[misc]
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            result: StepResult = super().train_step(batch, state, ctx)
            group = state["optimizer"].param_groups[0]
            group["lr"], group["weight_decay"] = group["lr"] * 0.9, group["weight_decay"] + 0.01
            return result

    straight = trainer(tmp_path / "straight", Moving, {"lr": 0.1}, LAST)
    straight.train()
    halves = in_two_parts(tmp_path / "halves", Moving, {"lr": 0.1}, {"lr": 0.1}, precision="fp32")
    assert torch.equal(halves["model"].weight, straight.model_state["model"].weight)
    for group in ("lr", "weight_decay"):
        ours, theirs = (s["optimizer"].param_groups[0][group] for s in (halves, straight.model_state))
        assert ours == theirs


class Own:
    """Keeps its learning rate in its own payload."""

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"weight": np.zeros(1), "lr": ctx.job.hyperparams["lr"], "rows": 0}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return np.asarray(raw_batch)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["weight"] -= state["lr"] * (state["weight"] - batch)
        state["rows"] += 1
        return StepResult(metrics={"loss": float(state["weight"].sum())})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return dict(state)

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


def test_a_value_that_the_load_puts_back_is_refused_with_the_remedy(tmp_path: Path) -> None:
    trainer(tmp_path, Own, {"lr": 0.002}, FIRST).train()
    with pytest.raises(InputError) as caught:
        trainer(tmp_path, Own, {"lr": 0.0005}, LAST).train()
    said = str(caught.value)
    assert "hyperparams.lr was 0.002 and is now 0.0005, but the checkpoint restores 0.002" in said
    assert "apply_hyperparams(self, state, changes, ctx)" in said
    assert "set hyperparams.lr back to 0.002" in said
    assert not [line for line in log_lines(tmp_path) if "is now 0.0005" in line["message"]]


def test_a_value_that_was_not_given_before_is_refused_too(tmp_path: Path) -> None:
    class Default(Own):
        def configure(self, ctx: StepContext) -> dict[str, Any]:
            return {**super().configure(ctx), "decay": ctx.job.hyperparams.get("decay", 1)}

    trainer(tmp_path, Default, {"lr": 0.1}, FIRST).train()
    with pytest.raises(InputError, match=r"hyperparams\.decay was not set and is now 2"):
        trainer(tmp_path, Default, {"lr": 0.1, "decay": 2}, LAST).train()


def test_the_hook_is_given_what_changed_and_makes_it_take_effect(tmp_path: Path) -> None:
    class Willing(Own):
        def apply_hyperparams(self, state: Any, changes: Any, ctx: StepContext) -> None:
            assert changes == {"lr": (0.5, 0.25)}
            state["lr"] = ctx.job.hyperparams["lr"]

    state = in_two_parts(tmp_path, Willing, {"lr": 0.5}, {"lr": 0.25})
    assert state["lr"] == 0.25


def test_the_hook_is_not_called_where_nothing_changed(tmp_path: Path) -> None:
    class Unasked(Own):
        def apply_hyperparams(self, state: Any, changes: Any, ctx: StepContext) -> None:
            raise AssertionError(changes)

    in_two_parts(tmp_path, Unasked, {"lr": 0.5}, {"lr": 0.5})


def test_a_count_that_happens_to_equal_a_value_is_no_fault(tmp_path: Path) -> None:
    trainer(tmp_path, Own, {"lr": 0.5, "width": FIRST}, FIRST).train()
    trainer(tmp_path, Own, {"lr": 0.5, "width": 0}, LAST).train()


def log_lines(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "log"]


def test_what_takes_effect_is_announced(tmp_path: Path) -> None:
    in_two_parts(tmp_path, kind_of(sgd), {"lr": 0.002}, {"lr": 0.0005})
    assert any("hyperparams.lr was 0.002, is now 0.0005" in line["message"] for line in log_lines(tmp_path))


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    def either(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
        return getattr(torch.optim, hp["kind"])(model.parameters(), lr=0.1), None

    plugin = kind_of(either)
    trainer(tmp_path, plugin, {"kind": "SGD"}, FIRST).train()
    with pytest.raises(InputError, match=r"the optimizer .* was SGD and is now AdamW"):
        trainer(tmp_path, plugin, {"kind": "AdamW"}, LAST).train()


def test_a_changed_seed_gives_other_random_numbers(tmp_path: Path) -> None:
    class Noisy(Own):
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            state["weight"] += np.random.standard_normal(1)
            return StepResult(metrics={"loss": float(state["weight"].sum())})

    same = in_two_parts(tmp_path / "same", Noisy, {"lr": 0.1}, {"lr": 0.1})["weight"]
    other = in_two_parts(tmp_path / "other", Noisy, {"lr": 0.1}, {"lr": 0.1}, seed=7)["weight"]
    again = in_two_parts(tmp_path / "again", Noisy, {"lr": 0.1}, {"lr": 0.1}, seed=7)["weight"]
    assert not np.array_equal(same, other)
    assert np.array_equal(other, again)


class Wrapped:
    """An optimizer as some libraries wrap it: the same groups, another object."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def test_a_schedule_below_a_wrapped_optimizer_follows_the_new_rate(tmp_path: Path) -> None:
    def wrapped(model: torch.nn.Module, hp: dict[str, Any]) -> tuple[Any, Any]:
        optimizer, scheduler = step_lr(model, hp)
        return Wrapped(optimizer), scheduler

    state = in_two_parts(tmp_path, kind_of(wrapped), {"lr": 0.1}, {"lr": 0.01})
    assert torch.equal(state["model"].weight, by_hand(step_lr, {"lr": 0.1}, {"lr": 0.01}))


def test_an_optimizer_that_only_its_scheduler_names_is_found() -> None:
    optimizer, scheduler = step_lr(torch.nn.Linear(2, 1), {"lr": 0.1})
    found = ConfiguredOptions.of(state={"scheduler": scheduler})
    assert list(found.optimizers.values()) == [optimizer]


def test_a_model_that_a_scheduler_holds_is_not_copied() -> None:
    optimizer, _ = sgd(torch.nn.Linear(2, 1), {"lr": 0.1})

    class Costly(torch.nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a model was copied")

    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.model = Costly(2, 1)  # type: ignore[attr-defined]
    options = ConfiguredOptions.of(state=[optimizer, scheduler])
    options.keep_fresh()
    kept = options.describe_before({"lr": (0.2, 0.1)})
    optimizer.param_groups[0]["lr"] = 0.7  # not what a scaling would come from
    scheduler.last_epoch = 3
    options.apply(kept)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_optimizers_are_found_wherever_a_class_keeps_them() -> None:
    model = torch.nn.Linear(2, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1)
    state = {"parts": [Holder(first)], "model": model}
    found = ConfiguredOptions.of(state=state, trainer=Holder({"rates": scheduler, "all": (second,)}))
    assert list(found.optimizers.values()) == [first, second]
    assert list(found.schedulers.values()) == [scheduler]


def test_weights_that_a_resume_would_ignore_are_refused() -> None:
    resumption = Resumption(fields={"weights": (None, "other.pt")}, is_changed=True)
    with pytest.raises(InputError, match=r"a resume takes its weights from the checkpoint"):
        resumption.require_possible()
    Resumption(fields={"weights": ("other.pt", None)}, is_changed=True).require_possible()
