import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.contract.documents import Format, parse_document
from gen_worker.contract.job.rules import apply_profile, parse_job_spec, read_job_spec, spec_digest
from gen_worker.contract.job.spec import DatasetSpec, TrainingJobSpec
from gen_worker.errors import Category, SpecError

SOUND: dict[str, Any] = {
    "trainer_api_version": "v1",
    "run_id": "run-1",
    "trainer": "pkg.train:MyTrainer",
    "max_steps": 100,
    "dataset": {"parquet_paths": ["/data/a.parquet"], "batch_size": 8},
    "hyperparams": {"lr": 0.1},
    "profiles": {"small": {"max_steps": 1, "dataset": {"batch_size": 2}, "hyperparams": {"wd": 0}}},
}

OWN = {"source": "rows:Rows", "args": {"folder": "images"}, "batch_size": 4, "shuffle": True}


def sound(**changes: Any) -> dict[str, Any]:
    document = copy.deepcopy(SOUND) | changes
    return {key: value for key, value in document.items() if value is not ...}


def faults_of(document: object) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_job_spec(document, source="job.json")
    return caught.value.faults


def test_a_sound_document_is_the_job() -> None:
    spec = parse_job_spec(SOUND, source="job.json")
    assert spec.max_steps == 100
    assert spec.dataset == DatasetSpec(parquet_paths=["/data/a.parquet"], batch_size=8)


def test_faults_within_and_between_fields_come_at_once() -> None:
    document = sound(
        max_step=5,
        max_steps=...,
        run_id="a..b",
        seed=True,
        validate_every=3,
        early_stopping={"patience": 0},
        mock_batches=[],
    )
    document["dataset"]["batch_size"] = "32"
    document["resources"] = {"devices": ["cpu"], "gpus": 0}
    assert faults_of(document) == [
        "unknown field `max_step`: did you mean `max_steps`?",
        "early_stopping.patience: found 0, expected a whole number of at least 1",
        f"seed: found true, expected {seed_words()}",
        'dataset.batch_size: found "32", expected a whole number of at least 1 (without quotes)',
        "dataset.parquet_paths: given together with `mock_batches`, expected only one of "
        "`dataset.parquet_paths`, `dataset.source`, `inputs.dataset_parquet_refs`, `dataset.generated` or `mock_batches`",
        "validate_every: found 3, but there is nothing to validate on: give `validation.dataset` or set it to 0",
        "resources.devices: given together with `resources.gpus`, expected at most one of the two",
        'run_id: found "a..b", expected one without ".." and line ends: it names a folder',
    ]


def seed_words() -> str:
    (fault,) = faults_of(sound(seed="x"))
    return fault.partition("expected ")[2]


def test_the_error_is_a_startup_error_that_names_the_source() -> None:
    with pytest.raises(SpecError, match=r"^job\.json: 1 fault\n  - run_id: missing") as caught:
        parse_job_spec(sound(run_id=...), source="job.json")
    assert caught.value.category is Category.STARTUP


@pytest.mark.parametrize("version", ["v2", 1, None, ["v1"]])
def test_an_unknown_version_is_refused_before_the_rest_is_judged(version: object) -> None:
    (fault,) = faults_of({"trainer_api_version": version, "unheard_of": 1})
    assert fault.startswith("trainer_api_version: found ")
    assert 'reads only "v1"' in fault


@pytest.mark.parametrize("document", [[], "text", 3, None, [SOUND]])
def test_a_document_that_is_no_object_is_refused(document: object) -> None:
    assert "expected an object with the fields of a job" in faults_of(document)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": ..., "epochs": 2},
        {"max_steps": ..., "dataset": ..., "mock_batches": [1]},
        {"max_steps": ..., "dataset": {"batch_size": 4}, "mock_batches": []},
        {"dataset": {"batch_size": 4}, "inputs": {"dataset_parquet_refs": ["s3://b/x"]}},
        {"dataset": ..., "inputs": {"dataset_parquet_refs": ["s3://b/x"]}},
        {
            "validate_every": "epoch",
            "validation": {"dataset": {"parquet_paths": ["v"]}},
            "early_stopping": {},
        },
        {"validate_every": 0, "early_stopping": {"metric": "train/loss"}},
        {"metric_every": 100, "max_steps": 100, "early_stopping": {"metric": "train/loss"}},
        {"metric_every": 0, "fast_dev_run": 3, "early_stopping": {"metric": "train/loss"}},
        {
            "metric_every": 0,
            "checkpoints": {"keep_best": 2},
            "validate_every": "epoch",
            "validation": {"dataset": {"parquet_paths": ["v"]}},
        },
        {"resources": {"gpus": 2}},
        {"dataset": OWN, "validation": {"dataset": OWN}, "test": {"dataset": OWN}, "validate_every": 5},
        {"resume_checkpoint_path": "/c.meta.json"},
    ],
)
def test_what_the_rules_allow(changes: dict[str, Any]) -> None:
    spec = parse_job_spec(sound(**changes), source="job")
    assert spec.run_id == sound()["run_id"]
    assert parse_job_spec(msgspec.to_builtins(spec), source="written out") == spec


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_steps": ...}, "max_steps: neither it nor `epochs` is given"),
        ({"max_steps": None}, "max_steps: neither it nor `epochs` is given"),
        ({"dataset": ...}, "dataset: there is no data"),
        ({"dataset": {"parquet_paths": []}}, "dataset: there is no data"),
        ({"inputs": {"dataset_parquet_refs": ["x"]}}, "dataset.parquet_paths: given together with `inputs.dataset_parquet_refs`"),
        ({"validate_every": "epoch"}, 'validate_every: found "epoch", but there is nothing to validate on'),
        ({"early_stopping": {}}, "early_stopping.metric: found the default `val/loss`, but nothing is validated"),
        ({"early_stopping": {"metric": "val/x"}}, 'early_stopping.metric: found "val/x"'),
        (
            {"early_stopping": {"metric": "train/loss"}, "metric_every": 0},
            'early_stopping.metric: found "train/loss", but `metric_every` is 0: no step reports it',
        ),
        (
            {"early_stopping": {"metric": "train/loss"}, "metric_every": 101, "max_steps": 100},
            'early_stopping.metric: found "train/loss", but `metric_every` is 101, and `max_steps` is 100',
        ),
        ({"checkpoints": {"keep_best": 2}, "metric_every": 0}, "checkpoints.keep_best: found 2, but `metric_every` is 0"),
        (
            {"artifacts": {"keep_last": 1, "keep_best": 1}, "metric_every": 0},
            "artifacts.keep_best: found 1, but `metric_every` is 0",
        ),
        (
            {"resume_checkpoint_path": "a", "inputs": {"resume_checkpoint_ref": "b"}},
            "resume_checkpoint_path: given together with `inputs.resume_checkpoint_ref`",
        ),
        ({"dataset": OWN, "mock_batches": [1]}, "dataset.source: given together with `mock_batches`"),
        ({"dataset": {**OWN, "parquet_paths": ["x"]}}, "dataset.parquet_paths: given together with `dataset.source`"),
        ({"dataset": {**OWN, "columns": ["x"]}}, "dataset.columns: given together with `dataset.source`"),
        ({"dataset": {**OWN, "decode_cache": True}}, "dataset.decode_cache: given together with `dataset.source`"),
        ({"dataset": {**OWN, "readahead": 4}}, "dataset.readahead: given together with `dataset.source`"),
        ({"dataset": {"parquet_paths": ["x"], "args": {"a": 1}}}, "dataset.args: given without `dataset.source`"),
        ({"dataset": {"source": "rows"}}, 'dataset.source: found "rows", expected module:symbol'),
        ({"dataset": {"source": "rows.py:Rows.x y"}}, 'dataset.source: found "rows.py:Rows.x y"'),
        ({"validation": {"dataset": {"batch_size": 3}}}, "validation.dataset: there is no data"),
        (
            {"test": {"dataset": {**OWN, "parquet_paths": ["x"]}}},
            "test.dataset.parquet_paths: given together with `test.dataset.source`",
        ),
        ({"run_id": "a\n"}, "run_id: found"),
        ({"run_id": "a..b"}, "run_id: found"),
        ({"run_id": "."}, "run_id: found"),
        ({"run_id": "../x"}, "run_id: found"),
    ],
)  # fmt: skip
def test_what_the_rules_refuse(changes: dict[str, Any], says: str) -> None:
    assert any(fault.startswith(says) for fault in faults_of(sound(**changes)))


SERVER: dict[str, Any] = {
    "run_id": "served",
    "mode": "inference",
    "serving": {"checkpoint": "/runs/a/checkpoints/final.meta.json"},
}
PREDICTION: dict[str, Any] = {
    "run_id": "predicted",
    "mode": "inference",
    "prediction": {"checkpoint": "/c.meta.json", "parquet_paths": ["in.parquet"], "out": "/out"},
}
VERSION: dict[str, Any] = {
    "run_id": "run-1",
    "step": 7,
    "weights_hash": "sha256:00",
    "checkpoint": "/c.meta.json",
    "trainer": "pkg.train:MyTrainer",
    "config": SOUND,
}


class TestInference:
    @pytest.mark.parametrize(
        "document",
        [
            SERVER,
            PREDICTION,
            {**SERVER, "serving": {"version": VERSION}, "trainer": "pkg.train:MyTrainer"},
            {**SERVER, "serving": {**SERVER["serving"], "address": "unix:/run/model.sock", "replicas": 2}},
            {**SERVER, "resources": {"cpus": 2, "memory_mb": 100}, "retry": {"max_attempts": 1}, "env": {"A": "b"}},
            {**SERVER, "max_steps": None, "seed": 0, "checkpoint_every": 500},  # as where they are not given
            {**PREDICTION, "resources": {"processes": 2}},
        ],
    )  # fmt: skip
    def test_a_server_and_a_prediction_need_neither_steps_nor_a_dataset(
        self, document: dict[str, Any]
    ) -> None:
        spec = parse_job_spec(document, source="job")
        assert parse_job_spec(msgspec.to_builtins(spec), source="written out") == spec

    @pytest.mark.parametrize(
        ("document", "says"),
        [
            ({**SERVER, "serving": None}, "serving: neither it nor `prediction` is given"),
            ({**SERVER, **PREDICTION}, "serving: given together with `prediction`"),
            (sound(serving={}), 'serving: given, but only `mode: "inference"` reads it'),
            (sound(prediction=PREDICTION["prediction"]), "prediction: given, but only"),
            ({**SERVER, "serving": {}}, "serving.checkpoint: not given"),
            (
                {**SERVER, "serving": {"checkpoint": "/c.meta.json", "version": VERSION}},
                "serving.checkpoint: given together with `serving.version`",
            ),
            ({**PREDICTION, "prediction": {"parquet_paths": ["a"], "out": "o"}}, "prediction.checkpoint: not given"),
            ({**SERVER, "resources": {"processes": 2}}, "resources.processes: found 2, but a server has one"),
            ({**PREDICTION, "resources": {"nodes": 2}}, "resources.nodes: found 2"),
            ({**SERVER, "serving": {**SERVER["serving"], "address": "8000"}}, 'serving.address: found "8000"'),
            ({**SERVER, "serving": {**SERVER["serving"], "address": "unix:"}}, 'serving.address: found "unix:"'),
            ({**SERVER, "serving": {**SERVER["serving"], "address": "::1"}}, "serving.address: found"),
            (
                {**SERVER, "serving": {**SERVER["serving"], "gate": {"tolerance": 0.5}}},
                "serving.gate.tolerance: given without `serving.gate.metric`",
            ),
            (
                {**SERVER, "serving": {**SERVER["serving"], "feedback": {"metric": "mse"}}},
                "serving.feedback.metric: given without `serving.feedback.above`",
            ),
            (
                {**SERVER, "serving": {**SERVER["serving"], "feedback": {"above": 0.5}}},
                "serving.feedback.above: given without `serving.feedback.metric`",
            ),
            ({**SERVER, "resources": {"devices": ["cpu"], "gpus": 1}}, "resources.devices: given together"),
        ],
    )  # fmt: skip
    def test_what_its_rules_refuse(self, document: dict[str, Any], says: str) -> None:
        assert any(fault.startswith(says) for fault in faults_of(document))

    @pytest.mark.parametrize("document", [SERVER, PREDICTION])
    def test_what_is_about_training_is_refused_and_never_ignored(self, document: dict[str, Any]) -> None:
        training = {
            "max_steps": 5,
            "epochs": 1,
            "metric_every": 0,
            "checkpoint_every": 1,
            "sample_every": 1,
            "validate_every": 1,
            "early_stopping": {},
            "fast_dev_run": 1,
            "overfit_batches": 1,
            "hyperparams": {"lr": 1},
            "seed": 1,
            "precision": "bf16",
            "deterministic": True,
            "strict": True,
            "callbacks": ["a:b"],
            "dataset": {"parquet_paths": ["a"]},
            "mock_batches": [],
            "validation": {"dataset": {"parquet_paths": ["a"]}},
            "test": {"dataset": {"parquet_paths": ["a"]}},
            "inputs": {"base_model_ref": "a"},
            "uploads": {"metrics_url": "http://a"},
            "resume_from_latest": False,
            "resume_checkpoint_path": "a",
            "resume_non_finite": True,
            "resume_older": True,
            "weights": "a",
            "checkpoints": {"keep_last": 1},
            "artifacts": {"keep_last": 1},
            "sample_prompts": ["a"],
            "sample_seed": 1,
        }
        faults = faults_of({**document, **training})
        assert [fault.partition(":")[0] for fault in faults] == list(training)
        allowed = {
            "run_id",
            "name",
            "trainer",
            "owner",
            "release_ref",
            "mode",
            "serving",
            "prediction",
            "env",
            "tags",
        }
        allowed |= {
            "trainer_api_version",
            "resources",
            "retry",
            "time_limit_s",
            "grace_s",
            "heartbeat_s",
            "group",
            "profiles",
        }
        assert set(TrainingJobSpec.__struct_fields__) == allowed | set(training), (
            "a new field: is it about training?"
        )


class TestProfiles:
    def test_a_profile_is_laid_over_the_document(self) -> None:
        merged = apply_profile(SOUND, "small")
        assert merged["max_steps"] == 1
        assert merged["dataset"] == {"parquet_paths": ["/data/a.parquet"], "batch_size": 2}
        assert merged["hyperparams"] == {"lr": 0.1, "wd": 0}
        assert "profiles" not in merged

    def test_the_document_itself_is_not_changed(self) -> None:
        before = copy.deepcopy(SOUND)
        apply_profile(SOUND, "small")
        assert before == SOUND

    def test_an_unknown_profile_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(SpecError, match="unknown profile `smal`: did you mean `small`"):
            apply_profile(SOUND, "smal")
        with pytest.raises(SpecError, match="the document has none"):
            apply_profile({}, "small")

    @pytest.mark.parametrize("profiles", [[], {"small": 3}, {"small": {"profiles": {}}}])
    def test_malformed_profiles_are_refused(self, profiles: object) -> None:
        with pytest.raises(SpecError, match="profiles"):
            apply_profile({"profiles": profiles}, "small")

    def test_a_file_is_read_with_its_profile(self, tmp_path: Path) -> None:
        (tmp_path / "job.json").write_text(json.dumps(SOUND))
        assert read_job_spec(tmp_path / "job.json", profile="small").max_steps == 1
        assert read_job_spec(tmp_path / "job.json").max_steps == 100


class TestDigest:
    def test_it_does_not_depend_on_the_order_of_keys_on_defaults_or_on_profiles(self) -> None:
        digest = spec_digest(parse_job_spec(SOUND, source=""))
        assert digest.startswith("sha256:")
        reordered = dict(reversed(SOUND.items()))
        with_defaults = sound(seed=0, checkpoints={"keep_last": 3}, profiles=...)
        assert spec_digest(parse_job_spec(reordered, source="")) == digest
        assert spec_digest(parse_job_spec(with_defaults, source="")) == digest

    @pytest.mark.parametrize(
        "change",
        [{"seed": 1}, {"max_steps": 101}, {"hyperparams": {"lr": 0.2}}, {"checkpoints": {"keep_last": 4}}],
    )
    def test_it_depends_on_every_value(self, change: dict[str, Any]) -> None:
        assert spec_digest(parse_job_spec(sound(**change), source="")) != spec_digest(
            parse_job_spec(SOUND, source="")
        )

    def test_a_spec_made_by_hand_with_values_json_cannot_hold_is_refused(self) -> None:
        with pytest.raises(SpecError, match=r"hyperparams\.x"):
            spec_digest(TrainingJobSpec(run_id="a", hyperparams={"x": object()}))


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    here = [at]
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        here += paths_in(inner, (*at, key))
    return here


@settings(max_examples=300, deadline=None)
@given(
    path=st.sampled_from([path for path in paths_in(SOUND) if path]),
    action=st.sampled_from(["drop", "rename", "replace"]),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just([])
    | st.just({})
    | st.just([[]]),
    name=st.text(max_size=8),
)
def test_any_mutation_of_a_sound_document_gives_a_spec_or_a_spec_error(
    path: tuple[Any, ...], action: str, value: Any, name: str
) -> None:
    document = copy.deepcopy(SOUND)
    holder: Any = document
    for step in path[:-1]:
        holder = holder[step]
    old = holder.pop(path[-1])
    if action == "rename" and isinstance(holder, dict):
        holder[name] = old
    elif action == "replace" and isinstance(holder, dict):
        holder[path[-1]] = value
    elif action == "replace":
        holder.insert(path[-1], value)
    try:
        spec = parse_job_spec(document, source="job")
    except SpecError:
        return
    assert spec_digest(spec).startswith("sha256:")


@settings(max_examples=150, deadline=None)
@given(
    cut=st.integers(0, 400),
    text=st.text(max_size=4),
    length=st.integers(0, 6),
    format_=st.sampled_from(["json", "yaml"]),
)
def test_any_damage_to_the_text_gives_a_spec_or_a_spec_error(
    cut: int, text: str, length: int, format_: Format
) -> None:
    whole = json.dumps(SOUND, indent=1)
    damaged = whole[:cut] + text + whole[cut + length :]
    try:
        parse_job_spec(parse_document(damaged, format_=format_, source="job"), source="job")
    except SpecError as error:
        assert error.source == "job"  # noqa: PT017


class TestGroupDevicesAndPrompts:
    def job(self, **fields: Any) -> TrainingJobSpec:
        return parse_job_spec({"run_id": "r", "mock_batches": [1], **fields}, source="job")

    def test_one_device_is_a_list_of_one(self) -> None:
        one, listed = (self.job(resources={"devices": devices}) for devices in ("cuda:1", ["cuda:1"]))
        assert one.resources.device_names == ["cuda:1"]
        assert one == listed
        assert spec_digest(one) == spec_digest(listed)
        with pytest.raises(SpecError, match=r"resources\.devices: found 3"):
            self.job(resources={"devices": 3})

    def test_prompts_are_texts_or_objects_as_they_are(self) -> None:
        prompts = ["a cat", {"text": "a dog", "seed": 3, "size": [64, 64]}]
        assert self.job(sample_prompts=prompts).sample_prompts == prompts
        with pytest.raises(SpecError, match=r"sample_prompts\[0\]: found 3"):
            self.job(sample_prompts=[3])

    def test_a_group_is_kept_and_does_not_contradict_a_tag(self) -> None:
        assert self.job(group="sweep-1").group == "sweep-1"
        assert self.job().group is None
        for wrong in ({"group": ""}, {"group": "a", "tags": {"group": "b"}}):
            with pytest.raises(SpecError, match="group: "):
                self.job(**wrong)
