"""A worker's plan: pure and printable, and the worker sees its own GPUs and no others."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gen_worker.contract.job.rules import read_job_spec
from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.contract.subprocess_contract import read_subprocess_contract
from trn.core.causes import QUEUED
from trn.core.home import Home, RunFolder
from trn.core.runs import Needs, RunRecord, RunState
from trn.daemon.dispatch.worker_plan import (
    WorkerFiles,
    build_plan,
    encode_files,
    render_plan,
    with_devices,
    without_gpus,
    write_attempt_files,
)

PYTHON = "/usr/bin/python3"
CONFIG = {"run_id": "r", "trainer": "a:B", "mock_batches": [1, 2]}


def run(**fields: Any) -> RunRecord:
    given: dict[str, Any] = {
        "run_id": "r",
        "digest": "sha256:1",
        "state": RunState.DISPATCHING,
        "cause": QUEUED,
        "config": CONFIG,
        "submitted_ms": 0,
        "updated_ms": 0,
    }
    return RunRecord(**{**given, **fields})


def plan(record: RunRecord, folder: RunFolder, *device_ids: str) -> WorkerFiles:
    return build_plan(
        record,
        2,
        folder,
        device_ids=device_ids,
        devices_env={"CUDA_VISIBLE_DEVICES": ",".join(name.partition(":")[2] for name in device_ids)},
        doorbell="/home/x/doorbell.sock",
        python=PYTHON,
        launcher_python=PYTHON,
    )


def test_the_jobs_variables_are_there_from_the_start_of_the_process(folder: RunFolder) -> None:
    def plan_with(env: dict[str, str], inherited: dict[str, str] | None = None, **fields: Any) -> WorkerFiles:
        record = run(config={**CONFIG, "env": env, "resources": {"cpus": 2}}, needs=Needs(cpus=2), **fields)
        return build_plan(
            record,
            1,
            folder,
            device_ids=(),
            devices_env={},
            doorbell="",
            python=PYTHON,
            launcher_python=PYTHON,
            inherited=inherited or {},
        )

    files = plan_with({"A": "1", "WORKER_MODE": "mine"}, secret_env=("HF_TOKEN", "A_KEY"))
    assert (files.plan.env["A"], files.plan.env["WORKER_MODE"]) == ("1", "trainer")
    assert files.plan.env["TRAINER_SECRET_ENV"] == "HF_TOKEN,A_KEY"
    assert (files.plan.env["OMP_NUM_THREADS"], files.plan.is_warm) == ("2", True)
    assert plan_with({"OMP_NUM_THREADS": "1"}).plan.env["OMP_NUM_THREADS"] == "1", "what is given comes first"
    # A fork of a process that has its libraries loaded would not obey it.
    assert not plan_with({"MKL_NUM_THREADS": "1"}).plan.is_warm
    assert plan_with({"MKL_NUM_THREADS": "1"}, {"MKL_NUM_THREADS": "1"}).plan.is_warm


def test_the_mode_of_a_worker_is_that_of_its_run(folder: RunFolder) -> None:
    assert plan(run(config=CONFIG), folder).plan.env["WORKER_MODE"] == "trainer"
    assert plan(run(config={**CONFIG, "mode": "inference"}), folder).plan.env["WORKER_MODE"] == "inference"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return Home(tmp_path).run("r")


@pytest.mark.parametrize(
    ("asked", "is_wanted"),
    [
        ({}, True),
        ({"checkpoint_every": 5}, True),
        ({"checkpoint_every": 0}, False),
        ({"checkpoint_every": 0, "callbacks": ["a:Saves"]}, True),
    ],
)
def test_a_run_that_saves_only_at_its_end_gets_no_process_for_it(
    folder: RunFolder, asked: dict[str, Any], is_wanted: bool
) -> None:
    assert plan(run(config={**CONFIG, **asked}), folder).plan.is_writer_wanted is is_wanted


def test_a_plan_names_all_that_its_worker_needs(folder: RunFolder) -> None:
    made = plan(run(base_dir="/jobs/x", snapshot="sha256:2"), folder, "cuda:3").plan
    assert (made.run_id, made.number, made.is_warm) == ("r", 2, True)
    assert made.argv == (PYTHON, "-P", "-m", "gen_worker.entrypoint")
    assert made.env == {
        "WORKER_MODE": "trainer",
        "TRAINER_CONTRACT_PATH": str(folder.contract),
        "TRAINER_ATTEMPT": "2",
        "TRAINER_DOORBELL": "/home/x/doorbell.sock",
        "TRAINER_BASE_DIR": "/jobs/x",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert (made.cwd, made.code_dir) == ("/jobs/x", str(folder.code))
    assert not folder.root.exists()  # nothing was written


def test_without_a_snapshot_the_base_folder_is_imported_from_and_without_both_the_runs_own_is_home(
    folder: RunFolder,
) -> None:
    assert plan(run(base_dir="/jobs/x"), folder).plan.code_dir == "/jobs/x"
    bare = plan(run(), folder).plan
    assert (bare.code_dir, bare.cwd) == ("", str(folder.root))
    assert "TRAINER_BASE_DIR" not in bare.env


def test_another_interpreter_is_started_cold(folder: RunFolder) -> None:
    made = plan(run(interpreter="/opt/py/bin/python"), folder).plan
    assert (made.argv[0], made.is_warm) == ("/opt/py/bin/python", False)


def test_threads_are_limited_only_where_the_job_names_its_cpus(folder: RunFolder) -> None:
    assert "OMP_NUM_THREADS" not in plan(run(needs=Needs(cpus=2)), folder).plan.env
    named = run(config={**CONFIG, "resources": {"cpus": 3}}, needs=Needs(cpus=3))
    assert plan(named, folder).plan.env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("asked", "device_ids", "seen"),
    [
        ({"devices": ["cuda:5", "cuda:3"]}, ("cuda:5", "cuda:3"), ["cuda:0", "cuda:1"]),
        ({"devices": ["cuda:5", "cuda:5"]}, ("cuda:5",), ["cuda:0", "cuda:0"]),
        ({"devices": "cuda:5"}, ("cuda:5",), ["cuda:0"]),
        ({"gpus": 2, "processes": 2}, ("cuda:6", "cuda:7"), ["cuda:0", "cuda:1"]),
        ({}, ("rocm:1",), ["cuda:0"]),
        ({"devices": ["cpu"]}, (), ["cpu"]),
        ({"gpus": 0}, (), ["cpu"]),
        ({}, (), ["cpu"]),
    ],
)
def test_a_worker_finds_its_gpus_numbered_from_zero(
    asked: dict[str, Any], device_ids: tuple[str, ...], seen: list[str]
) -> None:
    job = with_devices({**CONFIG, "resources": asked}, device_ids)
    assert job["resources"]["devices"] == seen
    assert "gpus" not in job["resources"]  # the two may not be given together
    assert job["resources"].get("processes") == asked.get("processes")


def test_devices_that_only_the_settings_know_are_not_forced_on_a_worker() -> None:
    job = with_devices({**CONFIG, "resources": {"gpus": 1}}, ("cuda:0",), is_detected=False)
    assert job["resources"] == {}
    assert with_devices(CONFIG, (), is_detected=False)["resources"] == {"devices": ["cpu"]}


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        ({"gpus": 4}, {}),
        ({"gpus": 0}, {"devices": ["cpu"]}),
        ({"devices": ["cpu"]}, {"devices": ["cpu"]}),
        ({}, {}),
    ],
)
def test_a_worker_in_another_pool_takes_the_gpus_that_it_is_given_there(
    asked: dict[str, Any], seen: dict[str, Any]
) -> None:
    assert without_gpus({**CONFIG, "resources": {**asked, "pool": "lab"}}) == {
        **CONFIG,
        "resources": {**seen, "pool": "lab"},
    }


def test_the_written_files_are_what_a_worker_reads(folder: RunFolder) -> None:
    files = plan(run(config={**CONFIG, "resources": {"gpus": 1}, "tags": {"a": "b"}}), folder, "cuda:3")
    for _ in range(2):
        write_attempt_files(files, folder)
    contract = read_subprocess_contract(folder.contract)
    assert contract.trainer_plugin == "a:B"
    assert contract.events_path == str(folder.events)
    job = read_job_spec(contract.job_spec_path)
    assert isinstance(job, TrainingJobSpec)
    assert (job.resources.devices, job.tags) == (["cuda:0"], {"a": "b"})
    assert sorted(path.name for path in folder.root.iterdir()) == ["attempts", "contract.json", "job.json"]


def test_a_plan_can_be_typed_into_a_shell_and_read_as_json(folder: RunFolder) -> None:
    record = run(config={**CONFIG, "trainer": "a:B"}, base_dir="/tmp/it's here")
    files = plan(record, folder, "cuda:3")
    text = render_plan(files.plan)
    assert "export TRAINER_ATTEMPT=2" in text
    assert text.splitlines()[-1].startswith(f"{PYTHON} -P -m gen_worker.entrypoint >> ")
    subprocess.run(["bash", "-n", "-c", text], check=True)
    read = json.loads(encode_files(files))
    assert read["plan"]["number"] == 2
    assert read["job"]["resources"] == {"devices": ["cuda:0"]}
    assert read["contract"]["contract_version"] == "v1"
    assert read["shell"] == text
