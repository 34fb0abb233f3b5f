"""A config that is wrong is refused with one message that says where, what and what to do instead."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gen_worker.errors import ExitCode, SpecError
from gen_worker.pytorch.job_file import apply_settings, read_job_file, write_job_file
from gen_worker.pytorch.sections import read_runner_config
from gen_worker.pytorch_runner import main

HYPERPARAMS: dict[str, Any] = {
    "model": {"type": "mlp", "args": {"out_features": 3, "hidden": [8]}},
    "columns": {"inputs": {"x": "x"}, "target": "label"},
    "loss": "cross_entropy",
    "threads": 1,
}
LM: dict[str, Any] = {
    "model": {"type": "transformer_lm", "args": {"vocab_size": 32, "width": 8, "num_heads": 2}},
    "columns": {"inputs": {"tokens": {"sequence_length": 6}}},
    "loss": "next_token",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with a column of every kind, and a module of the author's."""
    folder = tmp_path_factory.mktemp("config")
    random = np.random.default_rng(0)
    num_rows = 24
    x = random.standard_normal((num_rows, 4)).astype("float32")
    tokens = [list(range(1, 3 + row % 6)) for row in range(num_rows)]
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
            "label": pa.array(random.integers(0, 3, num_rows)),
            "y": pa.array(x.sum(axis=1)),
            "name": pa.array(["row"] * num_rows),
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "lists": pa.array([row.tolist() for row in x], pa.list_(pa.float32())),
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=8)
    torch.save({"other.weight": torch.zeros(2)}, folder / "other.pt")
    (folder / "authors_models.py").write_text(
        "import torch\n"
        "NUMBER = 3\n"
        "def broken(size: int) -> torch.nn.Module:\n"
        "    raise ValueError(f'no model of size {size}')\n"
        "def text() -> str:\n"
        "    return 'a model'\n"
    )
    return folder


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


def job(hyperparams: Any, **changes: Any) -> dict[str, Any]:
    return {
        "max_steps": 4,
        "dataset": {"parquet_paths": ["rows.parquet"], "batch_size": 8},
        "resources": {"devices": ["cpu"]},
        "hyperparams": hyperparams,
        **changes,
    }


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt section": (
        job(changed(HYPERPARAMS, learning_rat=0.1)),
        "hyperparams: unknown field `learning_rat`: did you mean `learning_rate`?",
    ),
    "a value out of range": (
        job(changed(HYPERPARAMS, learning_rate=-1)),
        "hyperparams.learning_rate: found -1, expected a number above 0",
    ),
    "an unknown optimizer": (
        job(changed(HYPERPARAMS, optimizer="AdmaW")),
        'hyperparams.optimizer.name: found "AdmaW", expected a class of torch.optim: did you mean "AdamW"?',
    ),
    "an unknown argument of the optimizer": (
        job(changed(HYPERPARAMS, optimizer={"name": "SGD", "args": {"momentun": 0.9}})),
        "hyperparams.optimizer.args: SGD has no argument `momentun`: did you mean `momentum`?",
    ),
    "a value that the optimizer refuses": (
        job(changed(HYPERPARAMS, optimizer={"name": "SGD", "args": {"momentum": -2.0}})),
        "hyperparams.optimizer.args: SGD rejected its arguments: Invalid momentum value: -2.0",
    ),
    "the rate in two places": (
        job(changed(HYPERPARAMS, optimizer={"name": "SGD", "args": {"lr": 0.1}})),
        "hyperparams.optimizer.args.lr: use `hyperparams.learning_rate` instead",
    ),
    "an optimizer that asks for the loss again": (
        job(changed(HYPERPARAMS, optimizer="LBFGS")),
        "hyperparams.optimizer.name: LBFGS needs several losses per step",
    ),
    "a scheduler that waits for a metric": (
        job(changed(HYPERPARAMS, scheduler="ReduceLROnPlateau")),
        "hyperparams.scheduler.name: ReduceLROnPlateau depends on a metric",
    ),
    "an unknown scheduler": (
        job(changed(HYPERPARAMS, scheduler="CosineAnealingLR")),
        'did you mean "CosineAnnealingLR"?',
    ),
    "a scheduler without what it needs": (
        job(changed(HYPERPARAMS, scheduler={"name": "StepLR"})),
        "hyperparams.scheduler.args.step_size: missing, StepLR needs it",
    ),
    "a fault inside a composed schedule": (
        job(
            changed(
                HYPERPARAMS,
                scheduler={
                    "name": "SequentialLR",
                    "args": {"milestones": [2]},
                    "schedulers": [{"name": "LinearLR"}, {"name": "StepLR", "args": {"step": 3}}],
                },
            )
        ),
        "hyperparams.scheduler.schedulers[1].args.step_size: missing",
    ),
    "an unknown loss": (
        job(changed(HYPERPARAMS, loss="crossentropy")),
        'hyperparams.loss.name: found "crossentropy"',
    ),
    "an unknown argument of the loss": (
        job(changed(HYPERPARAMS, loss={"name": "cross_entropy", "args": {"smoothing": 0.1}})),
        "hyperparams.loss.args: cross_entropy has no argument `smoothing`",
    ),
    "a loss that is no mean": (
        job(changed(HYPERPARAMS, loss={"name": "mse", "args": {"reduction": "sum"}})),
        "hyperparams.loss.args.reduction: found 'sum', expected a mean",
    ),
    "no target": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": "x"}})),
        "hyperparams.columns.target: missing, expected the target column of the loss",
    ),
    "an unknown model": (
        job(changed(HYPERPARAMS, model={"type": "mpl"})),
        'hyperparams.model.type: found "mpl", expected module:symbol or a shipped model: cnn, mlp, transformer_lm',
    ),
    "a model without what it needs": (
        job(changed(HYPERPARAMS, model={"type": "mlp"})),
        "hyperparams.model.args.out_features: missing, expected a whole number of at least 1",
    ),
    "a model with a misspelt argument": (
        job(changed(HYPERPARAMS, model={"type": "mlp", "args": {"out_features": 3, "hiden": [4]}})),
        "hyperparams.model.args: unknown field `hiden`: did you mean `hidden`?",
    ),
    "heads that do not divide the width": (
        job(changed(LM, model={"type": "transformer_lm", "args": {"vocab_size": 32, "width": 9}})),
        "hyperparams.model.args.num_heads: found 4, expected a divisor of `width` 9",
    ),
    "a model in a module that is not there": (
        job(changed(HYPERPARAMS, model={"type": "authors_modles:Net"})),
        'hyperparams.model.type: found "authors_modles:Net"',
    ),
    "a model that is not in its module": (
        job(changed(HYPERPARAMS, model={"type": "authors_models:borken"})),
        "did you mean 'broken'?",
    ),
    "a model that is no function": (
        job(changed(HYPERPARAMS, model={"type": "authors_models:NUMBER"})),
        "hyperparams.model.type: authors_models:NUMBER is a int, expected a class or a function",
    ),
    "a model that cannot be built": (
        job(changed(HYPERPARAMS, model={"type": "authors_models:broken", "args": {"size": 2}})),
        "building authors_models:broken: ValueError: no model of size 2 (at ",
    ),
    "a model that is none": (
        job(changed(HYPERPARAMS, model={"type": "authors_models:text"})),
        "authors_models:text returned a str, expected a torch.nn.Module",
    ),
    "a model for other rows": (
        job(changed(HYPERPARAMS, model={"type": "mlp", "args": {"out_features": 3, "in_features": 5}})),
        "the model mlp rejects float32 [2, 4]: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "a model for pictures": (
        job(changed(HYPERPARAMS, model={"type": "cnn", "args": {"out_features": 3}})),
        "hyperparams.model: cnn takes rows of channels, height and width, found rows of shape [4]",
    ),
    "a column that is not there": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": "x"}, "target": "lable"})),
        "hyperparams.columns.target: the data has no column `lable`: did you mean `label`?",
    ),
    "a column of text": (
        job(changed(HYPERPARAMS, columns={"inputs": {"name": {}}, "target": "label"})),
        "hyperparams.columns.inputs.name: column `name` holds text (string), expected numbers or lists of numbers",
    ),
    "a shape that does not fit": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": {"shape": [5]}}, "target": "label"})),
        "hyperparams.columns.inputs.x.shape: [5] has 5 values, but a row of column `x` has 4",
    ),
    "lists of any length": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": "lists"}, "target": "label"})),
        "column `lists` holds lists of any length of numbers (float), but the model needs rows of one length: set",
    ),
    "pictures in a column of numbers": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": {"image": {"size": [4, 4]}}}, "target": "label"})),
        "holds lists of 4 of numbers (float), expected bytes of PNG or JPEG files",
    ),
    "one-hot numbers that are no classes": (
        job(changed(HYPERPARAMS, columns={"inputs": {"x": "x"}, "target": {"column": "y", "one_hot": 3}})),
        "hyperparams.columns.target.one_hot: column `y` holds numbers (float), expected integers",
    ),
    "settings of a column that exclude each other": (
        job(
            changed(
                HYPERPARAMS,
                columns={"inputs": {"x": {"shape": [4], "sequence_length": 4}}, "target": "label"},
            )
        ),
        "hyperparams.columns.inputs.x.sequence_length: given together with `shape`",
    ),
    "tokens that are no whole numbers": (
        job(changed(LM, columns={"inputs": {"tokens": {"column": "lists", "sequence_length": 4}}})),
        "but `sequence_length` needs lists of integers",
    ),
    "next_token with a target": (
        job(changed(LM, columns={**LM["columns"], "target": "label"})),
        "hyperparams.columns.target: next_token makes its targets from the input: remove it",
    ),
    "a target that torch would stretch": (
        job(
            changed(
                HYPERPARAMS,
                model={"type": "mlp", "args": {"out_features": 1}},
                columns={"inputs": {"x": "x"}, "target": "y"},
                loss="mse",
            )
        ),
        "the loss rejects float32 [2, 1] from the model and float32 [2] as target",
    ),
    "an unknown metric": (
        job(changed(HYPERPARAMS, metrics={"accuracy": "MulticlasAccuracy"})),
        'did you mean "MulticlassAccuracy"?',
    ),
    "a metric for other classes": (
        job(
            changed(
                HYPERPARAMS,
                metrics={"accuracy": {"type": "MulticlassAccuracy", "args": {"num_classes": 7}}},
            )
        ),
        "hyperparams.metrics.accuracy: MulticlassAccuracy rejects float32 [2, 3] from the model",
    ),
    "a metric called loss": (
        job(changed(HYPERPARAMS, metrics={"loss": "MeanSquaredError"})),
        "hyperparams.metrics.loss: `loss` is always reported",
    ),
    "a pattern that freezes nothing": (
        job(changed(HYPERPARAMS, freeze=["encoder.*"])),
        'hyperparams.freeze[0]: "encoder.*" matches no parameter, expected a pattern for 1.weight, 1.bias',
    ),
    "nothing left to train": (
        job(changed(HYPERPARAMS, freeze=["*"])),
        "no parameter to train",
    ),
    "samples of what is no language model": (
        job(changed(HYPERPARAMS, sample={})),
        "hyperparams.sample: sampling needs a model that is trained with next_token",
    ),
    "samples that nobody described": (
        job(LM, sample_every=2),
        "sample_every: found 2, but `hyperparams.sample` is missing: add it",
    ),
    "weights of another model": (
        job(HYPERPARAMS, weights="other.pt"),
        "missing in the model: other.weight",
    ),
    "data that is not there": (
        job(HYPERPARAMS, dataset={"parquet_paths": ["cows.parquet"], "batch_size": 8}),
        "cows.parquet",
    ),
    "validation data without the columns": (
        job(
            changed(HYPERPARAMS, columns={"inputs": {"x": "x"}, "target": "label"}),
            validate_every=2,
            validation={"dataset": {"parquet_paths": ["rows.parquet"], "columns": ["x"]}},
        ),
        "hyperparams.columns.target: the data has no column `label`: it has x",
    ),
    "a job without an end": (
        {name: value for name, value in job(HYPERPARAMS).items() if name != "max_steps"},
        "max_steps: neither it nor `epochs` is given",
    ),
    "no hyperparams": (job({}), "hyperparams.model: missing, expected an object with type, args"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_gives_one_clear_message(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, expected = WRONG[name]
    config = folder / "config.json"
    config.write_text(json.dumps(document))
    monkeypatch.chdir(folder)
    code = main(["--config", str(config), "--check"])
    out, err = capfd.readouterr()
    assert expected in err
    assert code in (ExitCode.STARTUP, ExitCode.INPUT, ExitCode.MODEL_LOAD)
    assert err.count("gen_worker: ") == 1
    assert "Traceback" not in err
    (line,) = out.splitlines()
    rejected = json.loads(line)
    assert rejected["event"] == "job_rejected"
    assert any(expected in fault for fault in rejected["faults"])


def test_a_module_beside_the_config_that_python_does_not_find_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "nets_beside.py").write_text("")
    config = tmp_path / "beside.json"
    config.write_text(json.dumps(job({"model": {"type": "nets_beside:Net"}, "loss": "mse"})))
    with pytest.raises(SpecError) as found:
        read_job_file(config)
    assert found.value.__notes__ == [
        f"nets_beside.py is in {tmp_path}: start there, or set PYTHONPATH={tmp_path}"
    ]


def test_what_is_wrong_in_many_places_is_told_at_once(folder: Path) -> None:
    wrong = {
        "model": {"type": "mlp", "args": {"out_features": 0}},
        "columns": {"inputs": {"x": {"colum": "x"}}, "target": "label"},
        "loss": "mean_squares",
        "optimizer": {"name": "Adamm"},
        "scheduler": {"name": "OneCycleLR", "args": {"max_lr": 0.1, "total_step": 4}},
        "metrics": {"a": "Accuracyy"},
        "gradient_accumulation": 0,
    }
    config = folder / "many.json"
    config.write_text(json.dumps(job(wrong, metric_evry=3)))
    with pytest.raises(SpecError) as found:
        read_job_file(config)
    text = str(found.value)
    for part in (
        "unknown field `metric_evry`",
        "hyperparams.model.args.out_features",
        "hyperparams.columns.inputs.x: unknown field `colum`",
        "hyperparams.loss.name",
        "hyperparams.optimizer.name",
        "hyperparams.scheduler.args",
        "hyperparams.metrics.a.type",
        "hyperparams.gradient_accumulation",
    ):
        assert part in text


def test_a_sound_config_says_what_it_would_train(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "sound config.yaml"
    config.write_text(json.dumps(job(HYPERPARAMS)))  # JSON is YAML
    monkeypatch.chdir(folder)
    assert main(["--config", config.name, "--check", "--set", "hyperparams.freeze=[1.*]"]) == 0
    checked = json.loads(capfd.readouterr().out)
    assert checked["event"] == "job_checked"
    assert checked["run_id"] == "sound-config"
    assert (checked["num_parameters"], checked["num_trained"]) == (4 * 8 + 8 + 8 * 3 + 3, 8 * 3 + 3)
    assert (checked["rows"], checked["steps_per_epoch"]) == (24, 3)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) in ([], ["__pycache__"])


def test_paths_stay_where_the_config_says_when_the_job_is_written_elsewhere(
    folder: Path, tmp_path: Path
) -> None:
    config = folder / "paths.json"
    held_out = {"dataset": {"parquet_paths": ["rows.parquet"]}}
    inputs = {"base_model_ref": "s3://bucket/model", "resume_checkpoint_ref": "old/final.pt"}
    config.write_text(
        json.dumps(job(HYPERPARAMS, validation=held_out, test=held_out, weights="other.pt", inputs=inputs))
    )
    job_file = read_job_file(config, settings=["seed=5"])
    written = json.loads(write_job_file(job_file, tmp_path / "run").read_text())
    rows = str(folder / "rows.parquet")
    assert written["dataset"]["parquet_paths"] == [rows]
    assert written["validation"]["dataset"]["parquet_paths"] == [rows]
    assert written["test"]["dataset"]["parquet_paths"] == [rows]
    assert written["weights"] == str(folder / "other.pt")
    assert written["inputs"] == {
        "base_model_ref": "s3://bucket/model",
        "resume_checkpoint_ref": str(folder / "old" / "final.pt"),
    }
    assert (written["run_id"], written["seed"]) == ("paths", 5)
    assert written["trainer"] == "gen_worker.pytorch_runner:PyTorchTrainer"


def test_a_folder_of_another_run_is_left_alone(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (folder / f"{name}.json").write_text(json.dumps(job(HYPERPARAMS)))
    first = write_job_file(read_job_file(folder / "one.json"), tmp_path)
    before = first.read_bytes()
    with pytest.raises(Exception, match="is the folder of run 'one', not of 'two'"):
        write_job_file(read_job_file(folder / "two.json"), tmp_path)
    assert first.read_bytes() == before


def test_settings_reach_into_objects_and_lists() -> None:
    document: dict[str, Any] = {"a": {"b": 1}, "items": [1, {"c": 2}]}
    apply_settings(document, ["a.b=1e-4", "a.new.deep=[x, 2]", "items.1.c=true", "text=", "word=no"])
    assert document == {
        "a": {"b": 1e-4, "new": {"deep": ["x", 2]}},
        "items": [1, {"c": True}],
        "text": "",
        "word": "no",
    }
    with pytest.raises(SpecError, match=r"`a\.b` is 0.0001 and has no field `c`"):
        apply_settings(document, ["a.b.c=1"])
    with pytest.raises(SpecError, match="expected key=value"):
        apply_settings(document, ["max_steps"])


def test_short_forms_mean_the_long_ones() -> None:
    short = read_runner_config(
        changed(
            HYPERPARAMS,
            optimizer="SGD",
            scheduler={"name": "warmup_cosine"},
            compile="reduce-overhead",
            metrics={"m": "MeanSquaredError"},
        ),
        source="test",
    )
    assert short.loss_spec.name == "cross_entropy"
    assert short.optimizer_spec.name == "SGD"
    assert short.metric_specs["m"].type == "MeanSquaredError"
    assert short.compile_spec is not None
    assert short.compile_spec.mode == "reduce-overhead"
    assert read_runner_config(HYPERPARAMS, source="test").compile_spec is None
