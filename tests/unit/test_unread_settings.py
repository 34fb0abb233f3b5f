"""What is given and never read is named after step 1, or refused where the job is strict; `weights` are loaded."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.errors import CheckpointError, SpecError
from gen_worker.trainer import StepContext, StepResult, Trainer, TrainerConfig
from gen_worker.trainer.author.hyperparams import Hyperparams
from gen_worker.trainer.author.read_tracking import ReadTracker
from gen_worker.trainer.restore.weights import load_weights

BATCHES = [[float(n)] for n in range(4)]


class Reader:
    """Reads a learning rate, and nothing else."""

    def setup(self, ctx: StepContext) -> None: ...

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {"weight": np.zeros(1), "lr": ctx.job.hyperparams.get("learning_rate", 0.1)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return np.asarray(raw_batch)

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["weight"] -= state["lr"] * (state["weight"] - batch)
        return StepResult(metrics={"loss": float(state["weight"].sum())})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"weight": state["weight"]}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        state.update(payload)


def train(folder: Path, plugin: Any = Reader, **config: Any) -> Trainer:
    trainer = Trainer(plugin, TrainerConfig(**{"epochs": 1, **config}), train_data=BATCHES, folder=folder)
    trainer.train()
    return trainer


def warnings(folder: Path) -> list[str]:
    lines = (folder / "metrics" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event["message"] for event in events if event["event"] == "log" and event["level"] == "warning"]


def test_a_misspelt_hyperparameter_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    train(tmp_path, hyperparams={"learning_rat": 0.5})
    assert warnings(tmp_path) == [
        "hyperparams.learning_rat was given, but nothing read it; did you mean learning_rate?"
    ]


def test_settings_of_the_config_that_the_class_does_not_look_at_are_named(tmp_path: Path) -> None:
    train(tmp_path, gradient_clip_norm=1.0, gradient_accumulation=2, learning_rate=0.5, precision="bf16")
    said = warnings(tmp_path)
    assert said[:2] == [
        "hyperparams.gradient_accumulation was given, but nothing read it",
        "hyperparams.gradient_clip_norm was given, but nothing read it",
    ]
    assert said[2].startswith("precision is bf16, but Reader read neither ctx.dtype nor ctx.job.precision")
    assert len(said) == 3


@pytest.mark.parametrize("name", ["dtype", "precision"])
def test_a_class_that_looks_at_the_precision_is_not_warned(tmp_path: Path, name: str) -> None:
    class Looks(Reader):
        def configure(self, ctx: StepContext) -> dict[str, Any]:
            _ = ctx.dtype if name == "dtype" else ctx.job.precision
            return super().configure(ctx)

    train(tmp_path, Looks, precision="bf16")
    assert warnings(tmp_path) == []


@pytest.mark.parametrize("is_library", [False, True])
def test_prompts_that_nothing_samples_and_data_that_nothing_validates_are_named(is_library: bool) -> None:
    held_out = {"dataset": {"parquet_paths": ["val.parquet"]}}

    def unread(plugin: Any = Reader, **fields: Any) -> list[str]:
        document = {"run_id": "r", "mock_batches": [1], **fields}
        job = msgspec.convert(document, TrainingJobSpec)
        return ReadTracker(ctx=StepContext(job=job), is_library=is_library).close(plugin())

    assert unread(sample_prompts=["a"], sample_seed=1) == [
        "sample_prompts was given, but sample_every is 0: nothing is sampled",
        "sample_seed was given, but sample_every is 0: nothing is sampled",
    ]
    in_vain = ["validation was given, but validate_every is 0: nothing is validated"]
    assert unread(validation=held_out) == ([] if is_library else in_vain)
    assert unread(validation=held_out, validate_every="epoch") == []
    assert unread(sample_prompts=["a"], sample_every=2) == []
    assert unread(sample_prompts=["a"], validation=held_out, fast_dev_run=1) == []

    class Later(Reader):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> dict[str, float]:
            return {"num_prompts": float(len(ctx.job.sample_prompts))}

    assert unread(Later, sample_prompts=["a"]) == []


def test_a_default_precision_is_not_given(tmp_path: Path) -> None:
    train(tmp_path)
    assert warnings(tmp_path) == []


def test_strict_makes_it_an_error_after_step_one_and_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"hyperparams\.learning_rat was given") as caught:
        train(tmp_path, hyperparams={"learning_rat": 0.5, "wdith": 3}, strict=True)
    assert len(caught.value.faults) == 2
    assert not list((tmp_path / "checkpoints").glob("*.meta.json"))


def test_strict_is_content_where_everything_is_read(tmp_path: Path) -> None:
    train(tmp_path, hyperparams={"learning_rate": 0.5}, strict=True)


def test_what_only_a_later_hook_reads_is_no_fault(tmp_path: Path) -> None:
    class Later(Reader):
        def validate_step(self, batch: Any, state: Any, ctx: StepContext) -> dict[str, float]:
            return {"loss": ctx.job.hyperparams["scale"]}

    train(tmp_path, Later, hyperparams={"scale": 2.0}, strict=True)


def test_a_changed_value_is_not_announced_where_nothing_reads_it(tmp_path: Path) -> None:
    train(tmp_path, hyperparams={"width": 1})
    train(tmp_path, hyperparams={"width": 2}, epochs=2)
    assert not [line for line in warnings(tmp_path) if "width was 1, is now 2" in line]
    assert [line for line in warnings(tmp_path) if "hyperparams.width was given, but nothing read it" in line]


def test_a_changed_value_that_a_step_reads_is_announced(tmp_path: Path) -> None:
    class InStep(Reader):
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            assert ctx.job.hyperparams["width"]
            return super().train_step(batch, state, ctx)

    train(tmp_path, InStep, hyperparams={"width": 1})
    train(tmp_path, InStep, hyperparams={"width": 2}, epochs=2)
    assert [line for line in warnings(tmp_path) if "hyperparams.width was 1, is now 2" in line]


def test_a_class_that_keeps_them_has_not_read_them(tmp_path: Path) -> None:
    class Keeps(Reader):
        def setup(self, ctx: StepContext) -> None:
            self.ctx, self.settings = ctx, ctx.job.hyperparams

        def configure(self, ctx: StepContext) -> dict[str, Any]:
            return {**super().configure(ctx), "settings": self.settings}

    train(tmp_path, Keeps, hyperparams={"wdith": 3}, precision="bf16")
    assert len(warnings(tmp_path)) == 2


def test_a_part_of_an_object_that_nothing_read_is_not_announced_either() -> None:
    ctx, reads = tracked({"optimizer": {"lr": 1}, "width": 2})
    assert ctx.job.hyperparams["width"] == 2
    assert not reads.has_read("optimizer.lr")
    assert reads.has_read("width")


def tracked(hyperparams: dict[str, Any]) -> tuple[StepContext, ReadTracker]:
    ctx = StepContext(job=TrainingJobSpec(run_id="r", max_steps=3, hyperparams=hyperparams))
    return ctx, ReadTracker(ctx=ctx)


def test_nested_names_are_tracked_and_meant_names_are_of_the_same_place() -> None:
    ctx, reads = tracked({"optimizer": {"lr": 1, "moment": 2}, "momentum": 3})
    optimizer = ctx.job.hyperparams["optimizer"]
    assert (optimizer["lr"], optimizer.get("momentum"), ctx.job.hyperparams["momentum"]) == (1, None, 3)
    assert reads.close(Reader()) == [
        "hyperparams.optimizer.moment was given, but nothing read it; did you mean optimizer.momentum?"
    ]


@pytest.mark.parametrize(
    "read",
    [dict, list, lambda hp: dict(**hp), lambda hp: {**hp}, lambda hp: hp | {}, json.dumps, lambda hp: hp.items(),
     lambda hp: hp.copy(), copy.deepcopy, pickle.dumps, lambda hp: msgspec.convert(hp, dict[str, Any])],
)  # fmt: skip
def test_who_takes_all_has_read_all(read: Any) -> None:
    ctx, reads = tracked({"a": 1, "b": {"c": 2}})
    read(ctx.job.hyperparams)
    assert reads.close(Reader()) == []


def test_the_runtimes_own_digests_and_documents_do_not_count() -> None:
    ctx, reads = tracked({"a": 1})
    msgspec.to_builtins(ctx.job), msgspec.json.encode(ctx.job), repr(ctx.job), repr(ctx)
    assert repr(ctx).startswith("StepContext(")
    assert reads.close(Reader()) == ["hyperparams.a was given, but nothing read it"]


def test_it_is_a_dict_to_everyone_else() -> None:
    ctx, _ = tracked({"a": 1, "b": {"c": 2}})
    hyperparams = ctx.job.hyperparams
    assert hyperparams == {"a": 1, "b": {"c": 2}}
    assert isinstance(hyperparams, dict)
    assert pickle.loads(pickle.dumps(hyperparams)) == {"a": 1, "b": {"c": 2}}
    assert type(copy.deepcopy(hyperparams)) is dict
    assert msgspec.json.encode(hyperparams) == b'{"a":1,"b":{"c":2}}'


def test_after_step_one_reading_costs_what_a_dict_costs() -> None:
    ctx, reads = tracked({"a": 1, "b": {"c": 2}})
    hyperparams = ctx.job.hyperparams
    reads.close(Reader())
    assert type(ctx) is StepContext
    assert type(ctx.job) is TrainingJobSpec
    assert type(hyperparams) is type(hyperparams["b"]) is Hyperparams
    assert type(hyperparams).__getitem__ is dict.__getitem__
    assert ctx.job.hyperparams is hyperparams


def test_a_state_may_hold_them(tmp_path: Path) -> None:
    class Keeps(Reader):
        def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
            return {"weight": state["weight"], "settings": state["settings"]}

        def configure(self, ctx: StepContext) -> dict[str, Any]:
            return {**super().configure(ctx), "settings": ctx.job.hyperparams}

    train(tmp_path, Keeps, hyperparams={"learning_rate": 0.5, "more": {"x": 1}})


class Net(Reader):
    """A class with a module, which knows nothing of `weights`."""

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        torch.manual_seed(ctx.job.seed)
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def prepare_batch(self, raw_batch: Any, state: dict[str, Any], ctx: StepContext) -> Any:
        return torch.tensor([raw_batch])

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        state["optimizer"].zero_grad()
        loss = state["model"](batch).square().mean()
        loss.backward()
        state["optimizer"].step()
        return StepResult(metrics={"loss": loss.detach()})

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in state.items()}

    def load_state_dict(self, state: dict[str, Any], payload: dict[str, Any], ctx: StepContext) -> None:
        for name, part in state.items():
            part.load_state_dict(payload[name])


class Renamed(Net):
    """The same under another name: the one part that fits is taken."""

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        state = super().configure(ctx)
        return {"net": state["model"], "optimizer": state["optimizer"]}

    def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
        return super().train_step(batch, {**state, "model": state["net"]}, ctx)


class Two(Net):
    def configure(self, ctx: StepContext) -> dict[str, Any]:
        return {**super().configure(ctx), "other": torch.nn.Linear(1, 1)}


class Wide(Net):
    def configure(self, ctx: StepContext) -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


class Owner(Net):
    """Loads them itself."""

    def configure(self, ctx: StepContext) -> dict[str, Any]:
        assert ctx.model_handles["weights"]
        return super().configure(ctx)


def start_of(folder: Path, plugin: Any, weights: Path) -> dict[str, torch.Tensor]:
    """The model's weights before step 1, of a run that is given `weights`."""
    seen: dict[str, torch.Tensor] = {}

    class Watched(plugin):  # type: ignore[misc]
        def train_step(self, batch: Any, state: dict[str, Any], ctx: StepContext) -> StepResult:
            model = state.get("model", state.get("net"))
            if not seen:
                seen.update({name: value.clone() for name, value in model.state_dict().items()})
                seen["momentum"] = torch.tensor(len(state["optimizer"].state))
            result: StepResult = super().train_step(batch, state, ctx)
            return result

    trainer = Trainer(
        Watched, TrainerConfig(epochs=1, seed=5, strict=True), train_data=BATCHES, folder=folder
    )
    trainer._job = msgspec.structs.replace(trainer._job, weights=str(weights))
    trainer.train()
    return seen


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    train(tmp_path / "parent", Net, epochs=2)
    return tmp_path / "parent" / "checkpoints" / "final.meta.json"


@pytest.mark.parametrize("plugin", [Net, Renamed])
def test_weights_of_a_checkpoint_reach_a_class_that_does_not_look_at_them(
    tmp_path: Path, saved: Path, plugin: Any
) -> None:
    expected = torch.load(saved.with_name("final.pt"), weights_only=True)
    found = start_of(tmp_path / "child", plugin, saved)
    tensors = [value for value in _tensors(expected) if value.shape == found["weight"].shape]
    assert any(torch.equal(found["weight"], value) for value in tensors)
    assert found["momentum"] == 0  # never the optimizer


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_plain_file_of_weights_goes_into_the_only_module(tmp_path: Path, name: str) -> None:
    weights = {"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])}
    if name.endswith(".pt"):
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    found = start_of(tmp_path / "run", Net, tmp_path / name)
    assert found["weight"].item() == 3.0
    assert found["bias"].item() == 4.0
    with pytest.raises(CheckpointError, match="the state has 2 modules"):
        start_of(tmp_path / "two", Two, tmp_path / name)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        start_of(tmp_path / "wide", Wide, tmp_path / name)


def test_weights_with_nan_are_refused_and_an_infinity_only_where_the_model_has_none(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for value in (float("nan"), float("inf")):
        torch.save({"weight": torch.tensor([[3.0]]), "bias": torch.tensor([value])}, path)
        with pytest.raises(CheckpointError, match=r"w.pt contain NaN or infinity: bias. Use an earlier"):
            start_of(tmp_path / f"run-{value}", Net, path)
    module = torch.nn.Linear(1, 1)
    module.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    torch.save(module.state_dict(), path)
    load_weights(module, path)


def test_weights_that_nothing_can_take_are_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="its state has no torch module"):
        start_of(tmp_path / "numpy", Reader, saved)
    with pytest.raises(CheckpointError, match="do not fit the model"):
        start_of(tmp_path / "wide", Wide, saved)


def test_a_class_that_reads_them_is_left_to_it(tmp_path: Path, saved: Path) -> None:
    torch.manual_seed(5)
    fresh = torch.nn.Linear(1, 1)
    assert torch.equal(start_of(tmp_path / "run", Owner, saved)["weight"], fresh.weight)
