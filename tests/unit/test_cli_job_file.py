"""A job file and the options of the command line become one job, or all of its faults are named at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from trn.cli.submitting.model_job import make_model_job
from trn.cli.verbs.resume import find_checkpoint
from trn.client.job_file import Changes, assign, read_assignments, read_job
from trn.core.errors import InvalidRequestError, NotFoundError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def write_job(folder: Path, name: str = "job.json", **fields: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"trainer": "mine:Mine", "mock_batches": [1, 2], **fields}))
    return path


def faults_of(path: Path, **changes: Any) -> list[str]:
    with pytest.raises(InvalidRequestError) as refused:
        read_job(path, Changes(**changes)).require_sound()
    return refused.value.faults


@pytest.mark.parametrize(
    ("assignment", "changes", "says"),
    [
        ("name=b", {"name": "a"}, "`name` is given by --name, too: give one of the two"),
        ("weights=b.pt", {"weights": Path("a.pt")}, "`weights` is given by --weights"),
        ('resources={"gpus": 2}', {"is_cpu_only": True}, "`resources.gpus` is given by --cpu-only"),
        ("resources.devices=cuda", {"device_count": 2}, "`resources.devices` is given by --device-count"),
    ],
)
def test_a_field_that_an_option_sets_is_not_also_set_by_its_path(
    folder: Path, assignment: str, changes: dict[str, Any], says: str
) -> None:
    found = [
        fault for fault in faults_of(write_job(folder), assignments=[assignment], **changes) if says in fault
    ]
    assert len(found) == 1
    assert found[0].startswith(f"--set {assignment}: ")


def test_an_option_and_other_fields_of_its_section_are_laid_together(folder: Path) -> None:
    changes = Changes(assignments=['resources={"cpus": 2}'], is_cpu_only=True)
    assert read_job(write_job(folder), changes).config["resources"] == {"cpus": 2, "devices": ["cpu"]}


def test_what_an_option_of_a_served_model_sets_is_not_also_set_by_its_path() -> None:
    config = {"mode": "inference", "serving": {"checkpoint": "run@best", "replicas": 3}}
    assignments = [
        "serving.replicas=2",
        "serving.checkpoint=run@5",
        "serving.max_batch_rows=4",
        "mode=trainer",
    ]
    with pytest.raises(InvalidRequestError) as refused:
        make_model_job(config, assignments)
    shown = [fault for fault in refused.value.faults if "give one of the two" in fault]
    assert shown == [
        "--set serving.replicas=2: `serving.replicas` is given by --replicas, too: give one of the two",
        "--set serving.checkpoint=run@5: `serving.checkpoint` is given by RUN, too: give one of the two",
        "--set mode=trainer: `mode` is given by this command, too: give one of the two",
    ]


def test_a_trainer_class_needs_no_file(folder: Path) -> None:
    changes = Changes(assignments=["max_steps=5", "mock_batches=[1, 2]", "hyperparams.lr=0.1"])
    job = read_job(folder / "mine.models:Mine", changes)
    job.require_sound()
    assert job.base_dir == folder
    assert job.config == {
        "trainer": "mine.models:Mine",
        "max_steps": 5,
        "mock_batches": [1, 2],
        "hyperparams": {"lr": 0.1},
    }


def test_a_job_without_a_file_is_not_called_a_file(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the job of mine:Mine is not valid"):
        read_job(folder / "mine:Mine", Changes()).require_sound()
    with pytest.raises(InvalidRequestError, match=rf"^{folder}/job.json is not valid"):
        read_job(write_job(folder, max_stps=3), Changes()).require_sound()


def test_a_file_that_is_named_like_a_class_is_a_file(folder: Path) -> None:
    path = write_job(folder, name="job:Mine", max_steps=5)
    assert read_job(path, Changes()).config["trainer"] == "mine:Mine"


def test_options_are_laid_over_the_file_and_the_profile(folder: Path) -> None:
    path = write_job(
        folder,
        max_steps=5,
        hyperparams={"lr": 1, "depth": {"a": 1, "b": 2}},
        resources={"gpus": 4, "cpus": 2},
        profiles={"long": {"max_steps": 50, "hyperparams": {"depth": {"b": 3}}}},
    )
    changes = Changes(
        profile="long",
        assignments=[
            "hyperparams.depth.a=[1, null]",
            "hyperparams.kind=plain text",
            "tags.who=me",
            "env.N=1",
            "seed=7",
        ],
        name="trial",
        devices="cuda:0, cuda:1",
    )
    job = read_job(path, changes)
    assert job.base_dir == folder
    assert job.config == {
        "trainer": "mine:Mine",
        "mock_batches": [1, 2],
        "max_steps": 50,
        "seed": 7,
        "name": "trial",
        "tags": {"who": "me"},
        "env": {"N": "1"},
        "hyperparams": {"lr": 1, "depth": {"a": [1, None], "b": 3}, "kind": "plain text"},
        "resources": {"cpus": 2, "devices": ["cuda:0", "cuda:1"]},
    }


def test_yaml_is_read_as_the_worker_reads_it(folder: Path) -> None:
    path = folder / "job.yaml"
    path.write_text("trainer: mine:Mine\nmock_batches: [1]\nhyperparams: {lr: 1e-4, answer: no}\n")
    assert read_job(path, Changes()).config["hyperparams"] == {"lr": 0.0001, "answer": "no"}


def test_all_faults_are_named_at_once(folder: Path) -> None:
    path = write_job(folder, max_stps=5, seed=-1)
    told = "\n".join(
        faults_of(path, assignments=["nonsense", "seed.x=1"], devices="cuda:0", is_cpu_only=True)
    )
    for part in (
        "did you mean `max_steps`?",
        "seed:",
        "--set nonsense: expected key=value",
        "--set seed.x=1: seed is -1, which has no fields",
        "--devices and --cpu-only exclude each other",
    ):
        assert part in told


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff\xfe", b"{", b'{"trainer": 1}'])
def test_a_file_that_holds_no_job_is_refused(folder: Path, content: bytes) -> None:
    (folder / "job.json").write_bytes(content)
    assert faults_of(folder / "job.json")


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"there is no job file .*absent\.yaml"):
        read_job(folder / "absent.yaml", Changes())
    assert "cannot be read" in faults_of(folder)[0]
    write_job(folder)
    for name, hint in (
        ("job", r"did you mean job\.json\?"),
        ("jbo.json", r"did you mean job\.json\?"),
        ("code", "named as module:Symbol"),
    ):
        with pytest.raises(InvalidRequestError, match=hint):
            read_job(folder / name, Changes())


def test_a_file_with_code_is_no_job_and_its_class_is_named_instead(folder: Path) -> None:
    (folder / "mine.py").write_text("class Mine: ...")
    with pytest.raises(InvalidRequestError, match="`trn run mine:SYMBOL --set …`"):
        read_job(folder / "mine.py", Changes())


def test_a_hyperparameter_without_its_prefix_is_found(folder: Path) -> None:
    path = write_job(folder, hyperparams={"lr": 0.1})
    assert "did you mean `hyperparams.lr`?" in faults_of(path, assignments=["lr=3"])[0]


def test_an_unknown_profile_is_named_with_the_nearest(folder: Path) -> None:
    path = write_job(folder, profiles={"quick": {}})
    assert "did you mean `quick`?" in faults_of(path, profile="quik")[0]


def test_a_set_does_not_change_what_it_was_laid_over() -> None:
    below = {"b": {"c": 1}}
    document: dict[str, Any] = {"a": below}
    assert assign(document, "a.b.c=2") is None
    assert (document, below) == ({"a": {"b": {"c": 2}}}, {"b": {"c": 1}})


def test_overrides_of_a_resume_name_every_fault() -> None:
    assert read_assignments(["max_steps=9", "a.b=null", "a.c=x=y"]) == {
        "max_steps": 9,
        "a": {"b": None, "c": "x=y"},
    }
    with pytest.raises(InvalidRequestError) as refused:
        read_assignments(["=1", "a..b=1"])
    assert len(refused.value.faults) == 2


def test_a_checkpoint_is_found_by_its_meta_or_its_data(tmp_path: Path) -> None:
    meta = tmp_path / "final.meta.json"
    fields = {"run_id": "r", "attempt": 1, "step": 2, "epoch": 0, "final": True}
    files = [{"name": "final.pt", "size_bytes": 3, "hash": "sha256:0"}]
    meta.write_text(json.dumps({"schema_version": "trainer_checkpoint.v1", **fields, "files": files}))
    (tmp_path / "final.pt").write_bytes(b"abc")
    assert find_checkpoint(meta) == find_checkpoint(tmp_path / "final.pt") == (meta, "r")
    (tmp_path / "plain.json").write_text('{"state": {"a": 1}}')
    assert find_checkpoint(tmp_path / "plain.json") == (tmp_path / "plain.json", "")
    with pytest.raises(NotFoundError):
        find_checkpoint(tmp_path / "other.meta.json")
    nested = '{"state":' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}"
    for content in ("{", "[]", "{}", '{"run_id": 1}', nested):
        meta.write_text(content)
        with pytest.raises(InvalidRequestError, match="cannot be resumed: expected an intact"):
            find_checkpoint(meta)


def test_a_config_for_the_runner_is_a_job_that_is_called_like_its_file(folder: Path) -> None:
    hyperparams = {"model": {"type": "mlp"}, "columns": {"inputs": {"x": "x"}}, "loss": "mse"}
    path = folder / "my kinds.json"
    path.write_text(json.dumps({"max_steps": 3, "mock_batches": [0], "hyperparams": hyperparams}))
    config = read_job(path, Changes()).config
    assert (config["trainer"], config["run_id"]) == ("gen_worker.pytorch_runner:PyTorchTrainer", "my-kinds")
    assert read_job(path, Changes(assignments=["run_id=mine"])).config["run_id"] == "mine"
