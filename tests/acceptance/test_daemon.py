"""The real daemon, launcher and workers, from the outside: what an operator and a client rely on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import trn
from trn.core.errors import ConflictError, InfeasibleError, InvalidRequestError, UnavailableError

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from warm_python import python_folder
from worker_process import write_rows

pytestmark = pytest.mark.usefixtures("warm_launchers")
TRAINERS = Path(__file__).parents[1] / "integration" / "trainers"
SETTINGS = """
heartbeat_timeout_s = 5
kill_patience_s = 2
sweep_s = 1
[inventory]
cpus = 4
devices = [{id = "cuda:0"}, {id = "cuda:1"}]
"""
ANYTHING_WRONG = (InvalidRequestError, InfeasibleError)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    home = tmp_path_factory.mktemp("daemon") / "home"
    daemon = DaemonProcess(home, settings=SETTINGS)
    daemon.wait_ready()
    yield daemon
    end_everything(home)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[trn.Client]:
    with trn.Client(daemon.home.root) as client:
        yield client


def job(tmp_path: Path, **more: Any) -> dict[str, Any]:
    options = {"witness": str(tmp_path), **more.pop("hyperparams", {})}
    return {
        "trainer": "witnessed:Witnessed",
        "mock_batches": list(range(1, 6)),
        "metric_every": 1,
        "resources": {"devices": ["cpu"]},
        "hyperparams": options,
        **more,
    }


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_trained_and_everything_about_it_is_in_one_folder(
    client: trn.Client, tmp_path: Path
) -> None:
    submission = client.submit(job(tmp_path, name="first"), base_dir=TRAINERS)
    run = client.wait(submission.run.run_id, timeout_s=DEADLINE_S)
    assert (run.state, run.step, run.metrics["train/loss"]) == ("COMPLETED", 5, 15.0)
    details = client.details(run.run_id)
    assert [(attempt.exit_code, attempt.step) for attempt in details.attempts] == [(0, 5)]
    folder = Path(details.folder)
    wait_until((folder / "environment.json").exists)
    kept = {
        "job.json",
        "contract.json",
        "worker.log",
        "environment.json",
        "attempts",
        "checkpoints",
        "metrics",
    }
    assert kept <= {path.name for path in folder.iterdir()}
    report = json.loads((folder / "environment.json").read_text())
    assert any(package.startswith("msgspec") for package in report["packages"])
    assert folder.stat().st_mode & 0o077 == 0 or folder.parent.parent.stat().st_mode & 0o077 == 0
    events = list(client.events(run.run_id))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {event["attempt"] for event in events} == {1}
    assert events[-1]["event"] == "completed"
    [series] = client.metrics(run.run_id, ["train/loss"]).values()
    assert series.values == (1.0, 3.0, 6.0, 10.0, 15.0)
    log = b"".join(chunk.data for chunk in client.logs(run.run_id)).decode()
    assert "completed at step 5" in log


def test_an_equal_run_is_not_trained_twice_unless_asked_for(client: trn.Client, tmp_path: Path) -> None:
    first = client.submit(job(tmp_path, name="twice"), base_dir=TRAINERS)
    again = client.submit(job(tmp_path, name="twice"), base_dir=TRAINERS)
    other = client.submit(job(tmp_path, name="twice"), base_dir=TRAINERS, force_new=True)
    assert (first.existed, again.existed, again.run.run_id) == (False, True, first.run.run_id)
    assert (other.existed, other.run.run_id == first.run.run_id) == (False, False)
    assert client.wait(other.run.run_id, timeout_s=DEADLINE_S).state == "COMPLETED"


def test_a_queued_run_trains_the_code_that_was_submitted(client: trn.Client, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    source = (TRAINERS / "witnessed.py").read_text()
    (code / "witnessed.py").write_text(source)
    blocker = client.submit(
        job(tmp_path, name="blocker", resources={"gpus": 2}, hyperparams={"step_ms": 200}), base_dir=TRAINERS
    )
    queued = client.submit(job(tmp_path, name="frozen", resources={"gpus": 2}), base_dir=code, code_dir=code)
    (code / "witnessed.py").write_text("raise RuntimeError('this is not what was submitted')\n")
    run = client.wait(queued.run.run_id, timeout_s=DEADLINE_S)
    assert (run.state, run.metrics["train/loss"]) == ("COMPLETED", 15.0), run.reason
    assert client.wait(blocker.run.run_id, timeout_s=DEADLINE_S).state == "COMPLETED"


def test_what_can_never_run_is_refused_at_once_in_words(client: trn.Client, tmp_path: Path) -> None:
    with pytest.raises(ANYTHING_WRONG, match="16 GPUs"):
        client.submit(job(tmp_path, resources={"gpus": 16}), base_dir=TRAINERS)
    with pytest.raises(InvalidRequestError) as refusal:
        client.submit(job(tmp_path, max_step=3, epochs=0), base_dir=TRAINERS)
    assert "max_step" in str(refusal.value)
    assert "epochs" in str(refusal.value)


def test_a_cancelled_run_saves_and_goes_on_exactly_in_a_new_run(client: trn.Client, tmp_path: Path) -> None:
    endless = job(tmp_path, name="endless", mock_batches=list(range(1, 400)), hyperparams={"step_ms": 20})
    run_id = client.submit(endless, base_dir=TRAINERS).run.run_id
    for event in client.events(run_id):
        if event["event"] in ("metric", "metrics") and event["step"] >= 3:
            break
    with pytest.raises(ConflictError):
        client.resume(run_id)
    client.cancel(run_id, "enough")
    run = client.wait(run_id, timeout_s=DEADLINE_S)
    assert run.state == "CANCELLED"
    assert "enough" in run.reason
    resumed = client.resume(run_id, overrides={"hyperparams": {"step_ms": 0}})
    after = client.wait(resumed.run.run_id, timeout_s=DEADLINE_S)
    assert (after.state, after.step, after.parent_run_id) == ("COMPLETED", 399, run_id), after.reason
    assert after.metrics["train/loss"] == sum(range(1, 400))
    first = next(event for event in client.events(after.run_id) if event["event"] == "metric")
    assert first["step"] > 3


def test_a_failure_is_retried_from_the_newest_checkpoint(client: trn.Client, tmp_path: Path) -> None:
    config = job(
        tmp_path,
        name="dies once",
        checkpoint_every=1,
        hyperparams={"die_at": 4},
    )
    run = client.wait(client.submit(config, base_dir=TRAINERS).run.run_id, timeout_s=DEADLINE_S)
    assert (run.state, run.attempt, run.metrics["train/loss"]) == ("COMPLETED", 2, 15.0), run.reason
    first, second = client.details(run.run_id).attempts
    assert (first.cause.id, first.cause.values["signal"]) == ("killed", "SIGKILL")
    assert second.exit_code == 0
    ends = [
        event["event"] for event in client.events(run.run_id) if event["event"] in ("failed", "completed")
    ]
    assert ends == ["failed", "completed"]


def test_a_worker_that_hangs_is_ended_and_says_why(client: trn.Client, tmp_path: Path) -> None:
    config = job(
        tmp_path,
        name="stopped",
        mock_batches=[1] * 500,
        hyperparams={"step_ms": 20},
        heartbeat_s=0.2,
        retry={"max_attempts": 0},
    )
    run_id = client.submit(config, base_dir=TRAINERS).run.run_id
    wait_until(lambda: client.get(run_id).step > 0)
    os.kill(client.details(run_id).attempts[0].pid, signal.SIGSTOP)
    run = client.wait(run_id, timeout_s=DEADLINE_S)
    assert run.state == "FAILED"
    assert "no heartbeat for" in run.reason


def is_alive(process: psutil.Process) -> bool:
    """Not one that has ended and waits to be reaped: it holds nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_of_several_processes_trains_and_is_cancelled_as_one(
    client: trn.Client, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.parquet", num_rows=32)
    config = {
        "name": "two processes",
        "trainer": "parallel_mlp:ParallelMlp",
        "dataset": {"parquet_paths": [str(rows)], "batch_size": 8},
        "max_steps": 6,
        "metric_every": 1,
        "resources": {"processes": 2, "cpus": 2, "devices": ["cpu"]},
    }
    warm = {"env": {"PYTHON_EXEC": f"{python_folder()}/python"}}  # torchrun starts the two with it
    run = client.wait(client.submit({**config, **warm}, base_dir=TRAINERS).run.run_id, timeout_s=DEADLINE_S)
    assert (run.state, run.step) == ("COMPLETED", 6), run.reason
    assert {event["attempt"] for event in client.events(run.run_id)} == {1}
    endless = {**config, "name": "two processes, cancelled", "max_steps": 1_000_000}
    run_id = client.submit(endless, base_dir=TRAINERS).run.run_id
    wait_until(lambda: client.get(run_id).step > 0)
    pid = client.details(run_id).attempts[0].pid
    family = psutil.Process(pid).children(recursive=True)
    assert len(family) >= 2
    client.cancel(run_id, "enough")
    assert client.wait(run_id, timeout_s=DEADLINE_S).state == "CANCELLED"
    assert [one for one in family if is_alive(one)] == []


@pytest.mark.usefixtures("without_torch")
def test_a_daemon_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    daemon = DaemonProcess(home, settings=SETTINGS)
    daemon.wait_ready()
    try:
        with trn.Client(home) as client:
            config = job(tmp_path, name="long", mock_batches=list(range(1, 60)), hyperparams={"step_ms": 20})
            run_id = client.submit(config, base_dir=TRAINERS).run.run_id
            wait_until(lambda: client.get(run_id).step > 2)
            pid = client.details(run_id).attempts[0].pid
            daemon.kill()
            daemon = DaemonProcess(home)
            run = client.wait(run_id, timeout_s=DEADLINE_S)
            assert (run.state, run.attempt, run.step) == ("COMPLETED", 1, 59)
            assert client.details(run_id).attempts[0].pid == pid
            second = subprocess.run(
                [sys.executable, "-m", "trn.daemon", "--home", str(home), "serve"],
                capture_output=True,
                text=True,
                check=False,
                timeout=DEADLINE_S,
            )
            assert second.returncode == 3
            assert f"pid {daemon.pid}" in second.stderr
            assert daemon.stop() == 0
            assert not (home / "daemon.json").exists()
    finally:
        end_everything(home)


@pytest.mark.usefixtures("without_torch")
def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    daemon = DaemonProcess(home, settings=SETTINGS)
    daemon.wait_ready()
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with trn.Client(home) as client:
            config = job(
                tmp_path,
                name="reused",
                mock_batches=[1] * 30,
                hyperparams={"step_ms": 50},
                retry={"max_attempts": 3, "backoff_s": 0.01},
            )
            run_id = client.submit(config, base_dir=TRAINERS).run.run_id
            wait_until(lambda: client.get(run_id).step > 0)
            daemon.kill()
            end_everything(home)
            record = home / "runs" / run_id / "attempts" / "1.json"
            told = json.loads(record.read_text())
            record.write_text(json.dumps({**told, "pid": stranger.pid}))
            daemon = DaemonProcess(home)
            run = client.wait(run_id, timeout_s=DEADLINE_S)
            assert (run.state, run.attempt) == ("COMPLETED", 2), run.reason
            assert stranger.poll() is None
            assert psutil.Process(stranger.pid).status() == psutil.STATUS_SLEEPING
    finally:
        stranger.kill()
        stranger.wait()
        end_everything(home)


@pytest.mark.usefixtures("without_torch")
def test_a_full_disk_refuses_in_words_and_everything_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    home = disk / "home"
    daemon = DaemonProcess(home, settings=f"min_free_bytes = 1000000\n{SETTINGS}")
    try:
        daemon.wait_ready()
        with trn.Client(home, patience_s=5) as client:
            slow = job(tmp_path, name="slow", mock_batches=[1] * 60, hyperparams={"step_ms": 50})
            slow["retry"] = {"max_attempts": 20, "backoff_s": 0.1}
            run_id = client.submit(slow, base_dir=TRAINERS).run.run_id
            wait_until(lambda: client.get(run_id).step > 0)
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(b"\0" * (1 << 16))
                except OSError:
                    pass

            def submit_many() -> None:
                for number in range(200):
                    client.submit(job(tmp_path, name=f"more-{number}"), base_dir=TRAINERS)

            with pytest.raises(UnavailableError, match="space"):
                submit_many()
            filler.unlink()
            submitted = client.submit(job(tmp_path, name="after"), base_dir=TRAINERS)
            assert client.wait(submitted.run.run_id, timeout_s=DEADLINE_S).state == "COMPLETED"
            assert client.wait(run_id, timeout_s=DEADLINE_S).state == "COMPLETED"
            assert daemon.is_running()
    finally:
        end_everything(home)
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
