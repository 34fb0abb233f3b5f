"""Submits: every fault at once, what can never fit is refused with the most that would, a resume goes on exactly."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gen_worker.contract.job.rules import lay_over, parse_job_spec
from trn.core.causes import QUEUED
from trn.core.errors import ConflictError, InfeasibleError, InvalidRequestError
from trn.core.runs import Needs, RunRecord, RunState
from trn.daemon.intake.resumption import plan_resume, with_checkpoint
from trn.daemon.intake.saved_checkpoints import SavedCheckpoint, newest_checkpoint, read_checkpoint
from trn.daemon.intake.submission import Submission, parse_job, read_config, read_submission
from trn.daemon.machine.devices import Device, Inventory
from trn.registry.base import NewRun

JOB = {"trainer": "pkg.mod:MyTrainer", "mock_batches": [1, 2]}


def machine(num_gpus: int = 8, *, cpus: int = 16, memory_mb: int = 1000, kind: str = "cuda") -> Inventory:
    devices = tuple(Device(device_id=f"{kind}:{index}", kind=kind, index=index) for index in range(num_gpus))
    return Inventory(devices=devices, cpus=cpus, memory_mb=memory_mb)


def submit(config: dict[str, Any] | bytes, inventory: Inventory | None = None, **fields: Any) -> NewRun:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return read_submission(
        Submission(config_json=text, **fields),
        inventory=inventory or machine(),
        max_config_bytes=100_000,
    )


def test_a_variable_that_the_daemon_sets_itself_is_refused_and_others_of_workers_are_not() -> None:
    env = {"TRAINER_PLUGIN": "a:B", "CUDA_VISIBLE_DEVICES": "1", "WORKER_MODE": "inference"}
    with pytest.raises(InvalidRequestError) as refused:
        submit({**JOB, "env": {**env, "A": "1"}})
    assert refused.value.faults == [
        "env.TRAINER_PLUGIN: trn sets this variable for every worker: name the class in `trainer`",
        "env.CUDA_VISIBLE_DEVICES: trn sets this variable for every worker: choose devices with `resources.devices` or"
        " --devices",
        "env.WORKER_MODE: trn sets this variable for every worker: leave it out",
    ]
    assert (
        submit({**JOB, "env": {"TRAINER_ISOLATED": "1", "RANK": "0"}}).config["env"]["TRAINER_ISOLATED"]
        == "1"
    )


def test_a_good_config_becomes_a_run() -> None:
    config = {
        **JOB,
        "run_id": "mine",
        "name": "n",
        "retry": {"max_attempts": 4},
        "tags": {"a": "b"},
        "resources": {"gpus": 2, "memory_mb": 5},
    }
    new = submit(config, priority=3, base_dir="/x", snapshot="sha256:1", interpreter="/py")
    assert new == NewRun(
        run_id="mine",
        digest="",
        config=config,
        name="n",
        priority=3,
        snapshot="sha256:1",
        base_dir="/x",
        interpreter="/py",
        max_attempts=4,
        needs=Needs(gpus=2, cpus=1, memory_mb=5),
        tags={"a": "b"},
        nonce=new.nonce,
    )
    assert len(new.nonce) == 16
    assert submit(config).nonce != new.nonce


def test_where_copies_of_its_lines_go_is_no_part_of_what_was_asked() -> None:
    new = submit(JOB, log_dir="/logs", event_log="/events.jsonl")
    assert (new.log_dir, new.event_log) == ("/logs", "/events.jsonl")
    assert new.config == submit(JOB).config == JOB


def test_the_folder_that_was_frozen_is_kept_and_is_no_part_of_what_was_asked() -> None:
    new = submit(JOB, snapshot="sha256:1", frozen_from="/home/u/project")
    assert new.frozen_from == "/home/u/project"
    assert new.digest == submit(JOB, snapshot="sha256:1").digest
    with pytest.raises(InvalidRequestError, match="frozen_from"):
        submit(JOB, snapshot="sha256:1", frozen_from="project")


def test_a_group_is_kept_as_a_tag_and_is_no_part_of_what_was_asked() -> None:
    new = submit({**JOB, "group": "sweep", "tags": {"a": "b"}})
    assert new.tags == {"a": "b", "group": "sweep"}
    assert new.config["group"] == "sweep"
    assert new.digest == submit(JOB).digest


def test_an_id_is_made_of_its_name_or_of_the_family_and_is_no_part_of_what_was_asked() -> None:
    one, two = submit(JOB), submit(JOB)
    assert one.run_id != two.run_id
    assert one.run_id.startswith("mytrainer-")
    assert one.config == two.config == JOB
    assert submit(JOB, family="first-run").run_id == "first-run"
    assert submit({**JOB, "run_id": "own"}, family="first-run").run_id == "own"
    assert submit({**JOB, "name": "Größe: 3 / x" * 20}).run_id.startswith("gr-e-3-x")
    assert submit({**JOB, "name": "…"}).run_id.startswith("run-")


@pytest.mark.parametrize("run_id", ["../x", "a/b", ".", "a..b", "", "x" * 129, "a\nb"])
def test_an_id_that_could_name_another_place_is_refused(run_id: str) -> None:
    with pytest.raises(InvalidRequestError):
        submit({**JOB, "run_id": run_id})


def test_all_faults_come_at_once_with_the_requests_own() -> None:
    config = {"max_stepz": 3, "mock_batches": [1], "seed": 1.5, "resources": {"nodes": 1, "gpus": "two"}}
    with pytest.raises(InvalidRequestError) as caught:
        submit(config, priority=5000, base_dir="relative", log_dir="logs", event_log="a\0")
    text = str(caught.value)
    for word in ("max_steps", "seed", "resources.gpus", "priority", "base_dir", "log_dir", "event_log"):
        assert word in text
    with pytest.raises(InvalidRequestError, match=r"resources\.nodes: found 2") as caught:
        submit({"mock_batches": [1], "resources": {"nodes": 2}})
    assert any(fault.startswith("trainer: not given") for fault in caught.value.faults)


def test_a_job_that_names_another_pool_than_local_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"resources\.pool: found 'lab', but this daemon has only local"
    ):
        submit({"trainer": "a:B", "mock_batches": [1], "resources": {"pool": "lab"}})
    submit({"trainer": "a:B", "mock_batches": [1], "resources": {"pool": "local"}})


def submit_to(pool: str, **resources: Any) -> NewRun:
    config = {"trainer": "a:B", "mock_batches": [1], "resources": {"pool": pool, **resources}}
    asked = Submission(config_json=json.dumps(config).encode())
    return read_submission(asked, inventory=machine(), pools=["lab", "local"], max_config_bytes=1 << 20)


def test_what_a_run_asks_of_another_pool_is_not_measured_by_this_machine() -> None:
    assert submit_to("lab", gpus=64, cpus=999, memory_mb=1 << 30).needs == Needs(
        gpus=64, cpus=999, memory_mb=1 << 30, pool="lab"
    )
    assert submit_to("lab").needs == Needs(pool="lab"), "not the GPUs that this machine has"
    assert submit_to("lab", devices=["cpu"]).needs == Needs(pool="lab")
    assert submit_to("local").needs.gpus > 0


@pytest.mark.parametrize(
    ("pool", "resources", "words"),
    [
        (
            "lba",
            {},
            "resources.pool: found 'lba', but the pools of this daemon are lab, local: name one of those",
        ),
        (
            "lab",
            {"devices": ["cuda:0"]},
            "resources.devices: names devices of the daemon's machine, but the run is",
        ),
        (
            "lab",
            {"nodes": 2},
            "resources.nodes: found 2, but this daemon starts the workers of a run on one machine",
        ),
        ("lab", {"gpus": 2, "processes": 4}, "4 processes need a GPU each and get 2"),
    ],
)
def test_what_another_pool_cannot_be_asked_for_is_refused(
    pool: str, resources: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        submit_to(pool, **resources)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{", "JSON"),
        (b"[]", "no object"),
        (b"\xff", "not UTF-8"),
        (b" ", "empty"),
        (b'{"a": NaN}', "finite"),
        (b'{"seed": 1, "seed": 2}', "more than once"),
        (b"[" * 5000 + b"]" * 5000, "nested deeper"),
        (b'{"hyperparams":' + b'{"a":' * 100 + b"1" + b"}" * 101, "nested deeper"),
        (b" " * 100_001, "at most 100000"),
        (b'{"run_id": "a\\u0000"}', "NUL"),
    ],
)
def test_hostile_bytes_are_refused_in_words(config: bytes, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        submit(config)


@pytest.mark.parametrize(
    ("resources", "num_gpus", "needs"),
    [
        ({}, 8, Needs(gpus=1, cpus=1)),
        ({}, 0, Needs(gpus=0, cpus=1)),
        ({"processes": 4}, 8, Needs(gpus=4, cpus=4)),
        ({"processes": 4}, 0, Needs(gpus=0, cpus=4)),
        ({"processes": 4, "cpus": 2}, 8, Needs(gpus=4, cpus=2)),
        ({"devices": ["cpu"]}, 8, Needs(cpus=1)),
        ({"gpus": 0}, 8, Needs(cpus=1)),
        ({"devices": ["cuda:3", "cuda:1", "cuda:3"]}, 8, Needs(devices=("cuda:3", "cuda:1"), cpus=1)),
        ({"devices": ["cuda:3"], "processes": 2}, 8, Needs(devices=("cuda:3",), cpus=2)),
        ({"gpus": 3, "memory_mb": 10}, 8, Needs(gpus=3, cpus=1, memory_mb=10)),
    ],
)
def test_resources_become_needs(resources: dict[str, Any], num_gpus: int, needs: Needs) -> None:
    assert submit({**JOB, "resources": resources}, machine(num_gpus)).needs == needs


@pytest.mark.parametrize(
    ("resources", "num_gpus", "words"),
    [
        ({"gpus": 16}, 8, "asks for 16 GPUs, this machine has 8: ask for at most 8"),
        ({"gpus": 1}, 0, "asks for 1 GPU, this machine has none: leave it out"),
        ({"devices": ["cuda:9", "cuda:0"]}, 2, "asks for cuda:9, this machine has cuda:0, cuda:1"),
        ({"devices": ["cuda:0"]}, 0, r'asks for cuda:0, this machine has no GPU: use \["cpu"\]'),
        ({"cpus": 99}, 8, "asks for 99 CPUs, this machine has 16: ask for at most 16"),
        ({"processes": 99, "gpus": 0}, 8, "asks for 99 CPUs"),
        ({"memory_mb": 5000}, 8, "asks for 5000 MB, this machine has 1000"),
        ({"processes": 4}, 2, "4 processes need a GPU each and get 2"),
        ({"processes": 4, "gpus": 2}, 8, "4 processes need a GPU each and get 2"),
        ({"processes": 2}, 1, "2 processes need a GPU each and get 1"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_most_that_would(
    resources: dict[str, Any], num_gpus: int, words: str
) -> None:
    with pytest.raises(InfeasibleError, match=words):
        submit({**JOB, "resources": resources}, machine(num_gpus))


@pytest.mark.parametrize("job", [JOB, {**JOB, "seed": 3.0}, {**JOB, "max_steps": 2.0}, {**JOB, "grace_s": 3}])
def test_the_quick_way_judges_as_the_thorough_one(job: dict[str, Any]) -> None:
    config = {**job, "run_id": "r"}

    def outcome(parse: Any) -> Any:
        try:
            return parse(config)
        except Exception as fault:
            return str(fault)

    assert outcome(parse_job) == outcome(lambda data: parse_job_spec(data, source="the job"))


def parent(**fields: Any) -> RunRecord:
    given: dict[str, Any] = {
        "run_id": "old",
        "digest": "sha256:1",
        "state": RunState.FAILED,
        "cause": QUEUED,
        "config": {
            **JOB,
            "run_id": "old",
            "max_steps": 10,
            "profiles": {"p": {}},
            "hyperparams": {"lr": 1, "b": 2},
            "inputs": {"resume_checkpoint_ref": "hf:x", "base_model_ref": "hf:y"},
        },
        "submitted_ms": 0,
        "updated_ms": 0,
        "step": 10,
    }
    return RunRecord(**{**given, **fields})


def test_a_resumed_run_is_a_run_of_its_own_that_goes_on_from_the_checkpoint() -> None:
    meta = Path("/h/runs/old/checkpoints/step-00000010.meta.json")
    checkpoint = SavedCheckpoint(path=meta, step=10, run_id="old")
    plan = plan_resume(parent(), overrides={"hyperparams": {"lr": 3}, "tags": None}, checkpoint=checkpoint)
    assert plan.config["resume_checkpoint_path"] == str(meta)
    assert plan.config["hyperparams"] == {"lr": 3, "b": 2}
    assert plan.config["inputs"] == {"base_model_ref": "hf:y"}  # the two may not be given together
    assert {"run_id", "profiles"} & plan.config.keys() == set()
    assert plan.note == "resumes from step-00000010.meta.json of run old at step 10"
    again = submit({**plan.config, "inputs": {}}, parent_run_id="old")
    assert again.parent_run_id == "old"
    assert again.run_id != "old"


def test_a_run_without_a_checkpoint_starts_anew_and_is_not_taken_for_its_parent() -> None:
    config = {**JOB, "max_steps": 10}
    plan = plan_resume(parent(config={**config, "run_id": "old"}), overrides={}, checkpoint=None)
    assert plan.note == "run old saved no checkpoint: this one starts from step 0"
    assert plan.config == config


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.DISPATCHING, RunState.RUNNING])
def test_a_live_run_is_not_resumed(state: RunState) -> None:
    with pytest.raises(ConflictError, match="cancel it first, or wait"):
        plan_resume(parent(state=state), overrides={}, checkpoint=None)


def test_a_complete_run_is_resumed_only_for_more() -> None:
    config = {"trainer": "a:B", "dataset": {"parquet_paths": ["x.parquet"]}, "max_steps": 10}
    complete = parent(state=RunState.COMPLETED, end_step=10, config=config)
    for overrides in ({}, {"max_steps": 10}, {"max_steps": 5}, {"hyperparams": {"lr": 2}}):
        with pytest.raises(InvalidRequestError, match="complete at step 10"):
            plan_resume(complete, overrides=overrides, checkpoint=None)
    assert plan_resume(complete, overrides={"max_steps": 11}, checkpoint=None).config["max_steps"] == 11
    stopped_early = parent(state=RunState.COMPLETED, step=4, end_step=10, config=config)
    assert plan_resume(stopped_early, overrides={}, checkpoint=None).config["max_steps"] == 10


def test_a_complete_run_is_trained_once_more_from_a_step_before_its_end() -> None:
    config = {"trainer": "a:B", "dataset": {"parquet_paths": ["x.parquet"]}, "max_steps": 10}
    complete = parent(state=RunState.COMPLETED, end_step=10, config=config)
    at = [SavedCheckpoint(path=Path("/x.meta.json"), step=step, run_id="old") for step in (5, 10)]
    assert plan_resume(complete, overrides={}, checkpoint=at[0]).config["max_steps"] == 10
    with pytest.raises(InvalidRequestError, match="complete at step 10"):
        plan_resume(complete, overrides={}, checkpoint=at[1])


def test_a_resume_is_not_asked_to_end_before_its_checkpoint() -> None:
    complete = parent(state=RunState.COMPLETED, end_step=10, config={**JOB, "max_steps": 10})
    at = SavedCheckpoint(path=Path("/x.meta.json"), step=5, run_id="old")
    for steps in (4, 5):
        with pytest.raises(
            InvalidRequestError, match=f"max_steps is {steps}, but the checkpoint is of step 5"
        ):
            plan_resume(complete, overrides={"max_steps": steps}, checkpoint=at)
    assert plan_resume(complete, overrides={"max_steps": 6}, checkpoint=at).config["max_steps"] == 6
    died_late = parent(config={**JOB, "max_steps": 10})  # its final checkpoint is to be made yet
    at_end = SavedCheckpoint(path=Path("/x.meta.json"), step=10, run_id="old")
    assert plan_resume(died_late, overrides={"max_steps": 10}, checkpoint=at_end).config["max_steps"] == 10


def test_mock_batches_are_one_pass_so_no_step_is_left_after_them() -> None:
    complete = parent(state=RunState.COMPLETED, config={"trainer": "a:B", "mock_batches": [0] * 10})
    with pytest.raises(InvalidRequestError, match="10 mock_batches are one pass"):
        plan_resume(complete, overrides={"max_steps": 20}, checkpoint=None)


ABC = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"


def save(folder: Path, stem: str, step: int, *, final: bool = False, **changes: Any) -> Path:
    (folder / f"{stem}.pt").write_bytes(b"abc")
    files = [{"name": f"{stem}.pt", "size_bytes": 3, "hash": ABC, **changes}]
    meta = folder / f"{stem}.meta.json"
    fields = {
        "step": step,
        "run_id": "r",
        "final": final,
        "files": files,
        "attempt": 1,
        "epoch": 0,
        "verified": True,
    }
    meta.write_text(json.dumps({"schema_version": "trainer_checkpoint.v1", **fields}))
    return meta


def test_the_newest_whole_checkpoint_is_found_and_what_was_passed_over_is_told(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none", "r") is None
    save(tmp_path, "step-00000002", 2)
    ten = save(tmp_path, "step-00000010", 10)
    save(tmp_path, "step-00000020", 20, size_bytes=99)
    (tmp_path / "step-00000030.meta.json").write_text("{")
    save(tmp_path, "step-00000040", 40, name="gone")
    found = newest_checkpoint(tmp_path, "r")
    assert found is not None
    assert (found.path, found.step, found.run_id) == (ten, 10, "r")
    unread, *rest = found.passed_over
    assert unread.startswith("step-00000030.meta.json: ")
    assert rest == [
        "step-00000040.pt: no step-00000040.meta.json: it was never committed",
        "step-00000040.meta.json: gone cannot be read: No such file or directory",
        "step-00000020.meta.json: step-00000020.pt is truncated: 3 bytes, its meta says 99",
    ]
    final = save(tmp_path, "final", 10, final=True)
    found = newest_checkpoint(tmp_path, "r")
    assert found is not None
    assert found.path == final, "it comes after its step"


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    save(tmp_path, "step-00000002", 2, size_bytes=4)
    save(tmp_path, "step-00000004", 4, name="gone")
    with pytest.raises(InvalidRequestError, match=r"no checkpoint in .* can be resumed") as refused:
        newest_checkpoint(tmp_path, "r")
    assert len(refused.value.faults) == 3, "of the second one, the file that nothing names, too"


def test_a_checkpoint_that_is_named_must_be_as_it_was_saved(tmp_path: Path) -> None:
    assert read_checkpoint(save(tmp_path, "final", 3)).step == 3
    with pytest.raises(InvalidRequestError, match="3 bytes, its meta says 4"):
        read_checkpoint(save(tmp_path, "final", 3, size_bytes=4))
    meta = save(tmp_path, "final", 3)
    (tmp_path / "final.pt").unlink()
    with pytest.raises(InvalidRequestError, match=r"final\.pt cannot be read"):
        read_checkpoint(meta)
    meta.write_text("[]")
    with pytest.raises(InvalidRequestError, match="cannot be read as a checkpoint's meta"):
        read_checkpoint(meta)
    plain = tmp_path / "plain.json"
    plain.write_text('{"state": {"sum": 3}}')
    assert (read_checkpoint(plain).step, read_checkpoint(plain).run_id) == (0, "")
    plain.write_text('{"sum": 3}')
    with pytest.raises(InvalidRequestError, match="is not a checkpoint"):
        read_checkpoint(plain)


def test_overrides_are_merged_key_by_key_and_null_takes_away() -> None:
    assert lay_over({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "d": None}) == {"a": {"b": 4, "c": 2}}
    at = SavedCheckpoint(path=Path("/x.meta.json"), step=3, run_id="")
    assert with_checkpoint({}, at) == {"resume_checkpoint_path": "/x.meta.json"}


@pytest.mark.parametrize(
    "text",
    [
        b'{"trainer":"m:T","trainer":"n:T","mock_batches":[1]}',  # a name twice
        b'{"trainer":"m:T","mock_batches":[123456789012345678901234567890]}',
        b'{"trainer":"m:T","name":"a\\u0000b","mock_batches":[1]}',
        b'{"trainer":"m:T","mock_batches":' + b"[" * 80 + b"1" + b"]" * 80 + b"}",
    ],
)
def test_what_is_not_as_our_clients_write_it_is_judged_the_long_way(text: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_config(text, max_config_bytes=1 << 20)


def test_the_short_way_and_the_long_way_read_the_same() -> None:
    config = {**JOB, "hyperparams": {"a": [1, 2.5, None, True, "é", {"b": {}}], "big": 2**63 - 1}}
    short = msgspec.json.encode(config)
    long = msgspec.json.format(short, indent=2)
    assert (
        read_config(short, max_config_bytes=1 << 20) == read_config(long, max_config_bytes=1 << 20) == config
    )


RUNNER_CONFIG = {
    "max_steps": 3,
    "dataset": {"parquet_paths": ["x.parquet"]},
    "hyperparams": {"model": {"type": "mlp"}, "columns": {"inputs": {"x": "x"}}, "loss": "mse_loss"},
}


def test_a_config_for_the_runner_is_a_job_without_naming_it() -> None:
    new = submit(RUNNER_CONFIG)
    assert new.config["trainer"] == "gen_worker.pytorch_runner:PyTorchTrainer"
    assert parse_job_spec({**RUNNER_CONFIG, "run_id": "r"}, source="x").trainer == new.config["trainer"]
    named = submit({**RUNNER_CONFIG, "trainer": "mine:Mine"})
    assert named.config["trainer"] == "mine:Mine"


def test_a_job_without_a_trainer_class_that_is_no_config_for_the_runner_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        submit({**RUNNER_CONFIG, "hyperparams": {"model": "resnet", "lr": 0.1}})
    assert any(fault.startswith("trainer: not given") for fault in caught.value.faults)
