"""The trainer class as the runtime drives it: what it trains, saves, restores, measures and starts from."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.errors import CheckpointError, ModelLoadError, SpecError, TrainStepError
from gen_worker.pytorch.config import CnnArgs, MlpArgs, ModelSpec, TransformerLmArgs
from gen_worker.pytorch.model.build import build_model
from gen_worker.pytorch.model.models import build_cnn, build_mlp, build_transformer_lm
from gen_worker.pytorch.runner_state import RunnerState
from gen_worker.pytorch.trainer import PyTorchTrainer
from gen_worker.trainer.api import load_trainer_plugin
from gen_worker.trainer.arrow_feed import ArrowFeed
from gen_worker.trainer.contracts import SampleRequest, StepContext
from gen_worker.trainer.restore.weights import load_weights
from gen_worker.trainer.steps.evaluation import Evaluator

NUM_ROWS, BATCH = 50, 8  # the last batch has two rows

HYPERPARAMS: dict[str, Any] = {
    "model": {"type": "mlp", "args": {"out_features": 3, "hidden": [8], "dropout": 0.2}},
    "columns": {"inputs": {"x": "x"}, "target": "label"},
    "loss": "cross_entropy",
    "optimizer": {"name": "AdamW", "no_weight_decay": "auto"},
    "learning_rate": 0.02,
    "threads": 1,
}
LM: dict[str, Any] = {
    "model": {
        "type": "transformer_lm",
        "args": {"vocab_size": 11, "width": 8, "num_heads": 2, "num_layers": 1},
    },
    "columns": {"inputs": {"tokens": {"sequence_length": 6}}},
    "loss": "next_token",
    "threads": 1,
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    x = random.standard_normal((NUM_ROWS, 4)).astype("float32")
    tokens = [random.integers(1, 11, random.integers(2, 9)).tolist() for _ in range(NUM_ROWS)]
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
            "label": pa.array((x.sum(axis=1) > 0).astype("int64") + (x[:, 0] > 0)),
            "y": pa.array(x.sum(axis=1)),
            "flag": pa.array(x[:, 0] > 0),
            "tokens": pa.array(tokens, pa.list_(pa.int64())),
        }
    )
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(table, path, row_group_size=20)
    return path


class Session:
    """A trainer class set up on the data, as the assembler would."""

    def __init__(
        self,
        data: Path,
        hyperparams: Mapping[str, Any],
        *,
        handles: Mapping[str, Any] | None = None,
        **job: Any,
    ) -> None:
        document = {
            "run_id": "r",
            "max_steps": 12,
            "dataset": {"parquet_paths": [str(data)], "batch_size": BATCH},
            "hyperparams": dict(hyperparams),
            **job,
        }
        self.feed = ArrowFeed.open([str(data)], batch_size=BATCH, shuffle=False)
        self.ctx = StepContext(
            job=parse_job_spec(document, source="test"), dataset=self.feed, model_handles=handles or {}
        )
        self.trainer = PyTorchTrainer()
        torch.manual_seed(3)
        self.trainer.setup(self.ctx)
        self.state: RunnerState = self.trainer.configure(self.ctx)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        batches = self.feed.batches(batch=self.ctx.step)
        for _ in range(num_steps):
            prepared = self.trainer.prepare_batch(next(batches), self.state, self.ctx)
            result = self.trainer.train_step(prepared, self.state, self.ctx)
            self.ctx.progress.step += 1
            losses.append(float(result.metrics["loss"]))
        return losses

    def evaluate(self) -> Mapping[str, float]:
        evaluator = Evaluator(kind="validation", source=self.feed, trainer=self.trainer, ctx=self.ctx)
        try:
            return evaluator.run(self.state).metrics
        finally:
            evaluator.close()

    def outputs(self, column: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's outputs and the targets of all rows, computed apart from the trainer class."""
        table = pq.read_table(self.feed.manifest.files[0].path)
        x = torch.from_numpy(np.stack(table["x"].to_numpy()))
        module = copy.deepcopy(self.state.evaluated_module).eval()
        with torch.no_grad():
            return module(x), torch.from_numpy(table[column].to_numpy().copy())


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(equal(value, two[key]) for key, value in one.items())
    return bool(one == two)


def test_the_runtime_finds_it_like_any_other_trainer_class() -> None:
    trainer = load_trainer_plugin("gen_worker.pytorch_runner:PyTorchTrainer")
    assert isinstance(trainer, PyTorchTrainer)


def test_it_learns(data: Path) -> None:
    session = Session(data, HYPERPARAMS, max_steps=100)
    before = session.evaluate()["val/loss"]
    for _ in range(8):
        session.ctx.progress.step = 0
        session.train(6)
    assert session.evaluate()["val/loss"] < 0.7 * before


FULL: dict[str, Any] = {
    **HYPERPARAMS,
    "scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 3}},
    "gradient_accumulation": 3,
    "gradient_clip_norm": 1.0,
    "ema": {"decay": 0.9, "every": 2},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_saved_is_all_that_the_next_steps_depend_on(data: Path, precision: str) -> None:
    straight = Session(data, FULL, precision=precision)
    straight.train(3)
    payload = copy.deepcopy(straight.trainer.state_dict(straight.state))
    resumed = Session(data, FULL, precision=precision, seed=99)  # other weights to begin with
    resumed.trainer.load_state_dict(resumed.state, payload, resumed.ctx)
    resumed.ctx.progress.step = 3
    rng = torch.get_rng_state()
    losses = straight.train(4)
    torch.set_rng_state(rng)
    assert resumed.train(4) == losses
    assert equal(resumed.trainer.state_dict(resumed.state), straight.trainer.state_dict(straight.state))


def test_a_checkpoint_of_other_settings_is_refused_in_words(data: Path) -> None:
    with_ema = Session(data, FULL)
    payload = with_ema.trainer.state_dict(with_ema.state)
    plain = Session(data, {name: value for name, value in FULL.items() if name != "ema"})
    with pytest.raises(CheckpointError, match="was made with `ema`, but the job is without it"):
        plain.trainer.load_state_dict(plain.state, payload, plain.ctx)
    larger = Session(data, {**FULL, "model": {"type": "mlp", "args": {"out_features": 3, "hidden": [9]}}})
    with pytest.raises(CheckpointError, match="the checkpoint's model is of another model"):
        larger.trainer.load_state_dict(larger.state, payload, larger.ctx)
    with pytest.raises(CheckpointError, match="version 7"):
        plain.trainer.load_state_dict(plain.state, {**payload, "version": 7}, plain.ctx)


def test_the_same_seed_builds_the_same_weights_and_leaves_the_streams_alone(data: Path) -> None:
    one, two = Session(data, HYPERPARAMS, seed=5), Session(data, HYPERPARAMS, seed=5)
    other = Session(data, HYPERPARAMS, seed=6)
    assert equal(one.state.module.state_dict(), two.state.module.state_dict())
    assert not equal(one.state.module.state_dict(), other.state.module.state_dict())
    torch.manual_seed(3)
    assert torch.rand(1) == (torch.manual_seed(3), Session(data, HYPERPARAMS), torch.rand(1))[2]


def test_metrics_are_those_of_the_whole_data_not_means_of_batches(data: Path) -> None:
    metrics = {
        "accuracy": {"type": "MulticlassAccuracy", "args": {"num_classes": 3, "average": "micro"}},
        "f1": {"type": "MulticlassF1Score", "args": {"num_classes": 3}},
        "auroc": {"type": "MulticlassAUROC", "args": {"num_classes": 3}},
        "each": {"type": "MulticlassRecall", "args": {"num_classes": 3, "average": None}},
    }
    session = Session(data, {**HYPERPARAMS, "metrics": metrics})
    session.train(6)
    found = [session.evaluate() for _ in range(2)]
    assert found[0] == found[1]
    logits, labels = session.outputs("label")
    values = found[0]
    assert values["val/loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), 1e-5)
    assert values["val/accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert values["val/f1"] == pytest.approx(float(multiclass_f1_score(logits, labels, num_classes=3)))
    assert values["val/auroc"] == pytest.approx(float(multiclass_auroc(logits, labels, num_classes=3)))
    assert {"val/each_0", "val/each_1", "val/each_2"} <= values.keys()


def test_the_loss_of_tokens_is_a_mean_over_tokens(data: Path) -> None:
    metrics = {"accuracy": {"type": "MulticlassAccuracy", "args": {"num_classes": 11, "average": "micro"}}}
    session = Session(data, {**LM, "metrics": metrics})
    session.train(3)
    values = session.evaluate()
    total, count, right = 0.0, 0, 0
    module = copy.deepcopy(session.state.module).eval()
    for row in pq.read_table(data)["tokens"].to_pylist():
        tokens = torch.tensor([row[:6]])
        with torch.no_grad():
            logits = module(tokens[:, :-1])[0]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        right += int((logits.argmax(-1) == tokens[0, 1:]).sum())
        count += len(row[:6]) - 1
    assert values["val/loss"] == pytest.approx(total / count, rel=1e-4)
    assert values["val/accuracy"] == pytest.approx(right / count, rel=1e-5)


def test_binary_metrics_take_the_targets_of_a_binary_loss(data: Path) -> None:
    hyperparams = {
        **HYPERPARAMS,
        "model": {"type": "mlp", "args": {"out_features": 1}},
        "columns": {"inputs": {"x": "x"}, "target": {"column": "flag", "shape": [1]}},
        "loss": "bce_with_logits",
        "metrics": {"accuracy": "BinaryAccuracy"},
    }
    assert 0 <= Session(data, hyperparams).evaluate()["val/accuracy"] <= 1


def test_the_average_is_what_is_evaluated(data: Path) -> None:
    session = Session(data, {**HYPERPARAMS, "ema": {"decay": 0.5}})
    session.train(4)
    assert session.state.average is not None
    logits, labels = session.outputs("label")
    expected = float(torch.nn.functional.cross_entropy(logits, labels))
    assert session.evaluate()["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert not equal(session.state.module.state_dict(), session.state.average.module.state_dict())


def test_compiling_changes_no_name_in_a_checkpoint(data: Path) -> None:
    from torch._dynamo.utils import counters  # it takes a second to import

    model = {"type": "mlp", "args": {"out_features": 3}}
    plain = Session(data, {**HYPERPARAMS, "model": model})
    compiled = Session(data, {**HYPERPARAMS, "model": model, "compile": {"backend": "eager"}, "ema": {}})
    counters.clear()
    assert compiled.train(2) == pytest.approx(plain.train(2), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    payload = compiled.trainer.state_dict(compiled.state)
    assert payload["model"].keys() == plain.trainer.state_dict(plain.state)["model"].keys()
    assert payload["ema"].keys() == payload["model"].keys()


def test_frozen_parameters_stay_and_have_no_optimizer_state(data: Path) -> None:
    session = Session(data, {**HYPERPARAMS, "freeze": ["1.*"]})
    before = copy.deepcopy(session.state.module.state_dict())
    session.train(3)
    after = session.state.module.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"4.weight", "4.bias"}
    assert session.trainer.state_dict(session.state)["optimizer"]["state"].keys() == {"4.weight", "4.bias"}


def test_several_inputs_are_given_by_name(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_inputs.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.LazyLinear(width)\n"
        "        self.b = torch.nn.Linear(width + 1, 3)\n"
        "    def forward(self, *, first, second):\n"
        "        return self.b(torch.cat([self.a(first), second], dim=1))\n"
    )
    monkeypatch.chdir(tmp_path)
    hyperparams = {
        **HYPERPARAMS,
        "model": {"type": "two_inputs:Net", "args": {"width": 5}},
        "columns": {
            "inputs": {"first": "x", "second": {"column": "y", "shape": [1]}},
            "target": "label",
        },
        "gradient_accumulation": 2,
        "channels_last": True,
    }
    session = Session(data, hyperparams)
    assert len(session.train(7)) == 7


def test_what_breaks_in_a_step_is_told_with_the_shapes(data: Path) -> None:
    args = {"vocab_size": 5, "width": 8, "num_heads": 2}
    session = Session(data, {**LM, "model": {"type": "transformer_lm", "args": args}})
    with pytest.raises(TrainStepError, match="a class or token id in the data is out of the model's range"):
        session.train(1)


def test_a_language_model_is_sampled_the_same_way_each_time(data: Path, tmp_path: Path) -> None:
    session = Session(data, {**LM, "sample": {"num_tokens": 9, "top_k": 4}})
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        session.trainer.sample(
            state=session.state,
            step=1,
            request=SampleRequest(prompts=["\x01\x02", "\x03"], seed=4),
            output_dir=str(tmp_path / name),
            ctx=session.ctx,
        )
        texts.append([path.read_text() for path in sorted((tmp_path / name).iterdir())])
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [11, 10]
    assert texts[0][0].startswith("\x01\x02")
    assert session.state.module.training


def test_prompts_that_are_no_text_are_refused_before_the_first_step(data: Path) -> None:
    with pytest.raises(SpecError, match=r"sample_prompts: found \{'text': 'a'\}, expected text"):
        Session(data, {**LM, "sample": {}}, sample_every=2, sample_prompts=["a", {"text": "a"}])


def test_samples_of_a_model_in_shares_are_refused_before_anyone_waits(data: Path) -> None:
    hyperparams = {**LM, "sample": {}, "strategy": "fsdp"}
    session = Session(data, hyperparams, sample_every=2)  # one process has all of it
    shared = StepContext(job=session.ctx.job, dataset=session.feed, world_size=2)
    with pytest.raises(SpecError, match="sample_every: found 2, but sampling runs in one process"):
        PyTorchTrainer().setup(shared)


def test_weights_are_taken_from_files_of_many_makers(data: Path, tmp_path: Path) -> None:
    source = Session(data, HYPERPARAMS, seed=8)
    state = source.state.module.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save({"model": state, "epoch": 3}, tmp_path / "nested.pt")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "wrapped.pt")
    save_file(state, tmp_path / "plain.safetensors")
    for name in ("plain.pt", "nested.pt", "wrapped.pt", "plain.safetensors"):
        session = Session(data, HYPERPARAMS, handles={"weights": tmp_path / name})
        assert equal(session.state.module.state_dict(), state), name


def test_weights_that_do_not_fit_are_listed_and_change_nothing(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    before = copy.deepcopy(module.state_dict())
    saved = {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(5), "head.weight": torch.ones(1)}
    torch.save(saved, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as found:
        load_weights(module, tmp_path / "w.pt")
    text = str(found.value)
    assert "missing in the file: 1.weight, 1.bias" in text
    assert "missing in the model: head.weight" in text
    assert "0.bias is [5] in the file and [2] in the model" in text
    assert equal(module.state_dict(), before)
    load_weights(module, tmp_path / "w.pt", strict=False)
    assert equal(module.state_dict(), {**before, "0.weight": torch.ones(2, 3)})
    (tmp_path / "bad.pt").write_bytes(b"not weights")
    (tmp_path / "bad.safetensors").write_bytes(b"not weights")
    (tmp_path / "json.meta.json").write_text(json.dumps({"state": {"optimizer": {}}}))
    for name, reason in (
        ("bad.pt", "cannot be read"),
        ("bad.safetensors", "cannot be read"),
        ("json.meta.json", "has no `model` weights"),
        ("absent.pt", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load_weights(module, tmp_path / name)


def test_a_file_that_would_run_code_is_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(CheckpointError, match="cannot be read as a file of tensors"):
        load_weights(torch.nn.Linear(1, 1), tmp_path / "trap.pt")
    assert not (tmp_path / "sprung").exists()


def test_shipped_models_take_their_sizes_from_the_data() -> None:
    mlp = build_mlp(MlpArgs(out_features=2, hidden=[5, 4], dropout=0.1), (3, 2))
    assert mlp(torch.zeros(7, 3, 2)).shape == (7, 2)
    for norm in ("batch", "group", "none"):
        cnn = build_cnn(CnnArgs(out_features=4, norm=norm), (3, 9, 8))
        assert cnn(torch.zeros(2, 3, 9, 8)).shape == (2, 4)
    with pytest.raises(Exception, match="which each block halves"):
        build_cnn(CnnArgs(out_features=4, channels=[4, 4, 4]), (1, 4, 4))
    with pytest.raises(Exception, match=r"model\.args\.in_features: missing"):
        build_mlp(MlpArgs(out_features=2), None)


def test_the_transformer_ties_its_weights_and_never_looks_ahead() -> None:
    args = TransformerLmArgs(vocab_size=13, width=8, num_heads=2, num_layers=2)
    model = build_transformer_lm(args, (6,)).eval()
    assert model.head.weight is model.tokens.weight
    tokens = torch.randint(0, 13, (2, 6))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 13
    with torch.no_grad():
        one, two = model(tokens), model(changed)
    torch.testing.assert_close(one[:, :4], two[:, :4])
    assert not torch.allclose(one[:, 4:], two[:, 4:])
    untied = build_transformer_lm(
        TransformerLmArgs(vocab_size=13, width=8, num_heads=2, tie_weights=False), (6,)
    )
    assert untied.head.weight is not untied.tokens.weight


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="returned a dict, expected a"):
        build_model(ModelSpec(type="builtins:dict"), seed=0, row_shape=None, device="cpu")


def test_an_mlp_joins_several_columns_of_single_numbers() -> None:
    from gen_worker.pytorch.config import MlpArgs
    from gen_worker.pytorch.model.models import build_mlp

    torch.manual_seed(0)
    joined = build_mlp(MlpArgs(out_features=2), (3,))
    age, income = torch.rand(4), torch.rand(4, 2)
    together = torch.cat([age.unsqueeze(1), income], dim=1)
    assert torch.equal(joined(age=age, income=income), joined(together))
    single = build_mlp(MlpArgs(out_features=2), ())
    assert single(torch.arange(4)).shape == (4, 2)


# What it answers when it is served.


def answers(session: Session, batch: pa.RecordBatch) -> dict[str, Any]:
    state = session.trainer.serving_state(session.state, session.ctx)
    state.module.eval()
    with torch.inference_mode():
        return session.trainer.predict(batch, state, session.ctx)


def rows_of(data: Path, *names: str) -> pa.RecordBatch:
    return pq.read_table(data, columns=list(names)).combine_chunks().to_batches()[0]


def test_a_classifier_answers_class_and_probability_without_labels(data: Path) -> None:
    session = Session(data, HYPERPARAMS)
    session.train(5)
    assert session.trainer.input_columns == ["x"]
    found = answers(session, rows_of(data, "x"))
    logits, _ = session.outputs("label")
    assert torch.equal(found["class"], logits.argmax(dim=1))
    assert torch.allclose(found["probability"], logits.softmax(dim=1))


def test_classes_with_names_are_answered_by_name(data: Path) -> None:
    session = Session(data, HYPERPARAMS)
    payload = {**session.trainer.state_dict(session.state), "classes": ["ant", "bee", "cat"]}
    session.trainer.load_state_dict(session.state, payload, session.ctx)
    found = answers(session, rows_of(data, "x"))
    logits, _ = session.outputs("label")
    assert found["class"] == [["ant", "bee", "cat"][each] for each in logits.argmax(dim=1)]


def test_a_regression_answers_a_number_a_row(data: Path) -> None:
    config = {
        **HYPERPARAMS,
        "model": {"type": "mlp", "args": {"out_features": 1}},
        "columns": {"inputs": {"x": "x"}, "target": {"column": "y", "shape": [1]}},
        "loss": "mse",
    }
    found = answers(Session(data, config), rows_of(data, "x"))
    assert found["output"].shape == (NUM_ROWS,)


def test_the_average_answers_where_there_is_one(data: Path) -> None:
    session = Session(data, {**HYPERPARAMS, "ema": {"decay": 0.5}})
    session.train(3)
    found = answers(session, rows_of(data, "x"))
    logits, _ = session.outputs("label")  # of the evaluated module
    assert torch.allclose(found["probability"], logits.softmax(dim=1))
    live = copy.deepcopy(session.state.module).eval()
    x = torch.from_numpy(np.stack(pq.read_table(data)["x"].to_numpy()))
    with torch.no_grad():
        assert not torch.allclose(found["probability"], live(x).softmax(dim=1))


def test_a_language_model_answers_the_token_that_follows_the_last_one(data: Path) -> None:
    """Whatever a row's length: padding changes nothing, and only the last tokens that the model can take count."""
    session = Session(data, LM)
    tokens = [[3, 1, 4], [1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    rows = pa.record_batch({"tokens": pa.array(tokens, pa.list_(pa.int64()))})
    found = answers(session, rows)
    module = copy.deepcopy(session.state.module).eval()
    for number, row in enumerate(tokens):
        with torch.no_grad():
            logits = module(torch.tensor([row[-5:]]))[0, -1]
        assert torch.allclose(found["probability"][number], logits.softmax(dim=0), atol=1e-6)
        assert int(found["next_token"][number]) == int(logits.argmax())
