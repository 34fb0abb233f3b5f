"""A real daemon whose files are not what it left: lost in a power cut, deleted, or of another submission."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trn
from trn.core.home import Home
from trn.daemon.__main__ import main as daemon_main
from trn.executors.local.launcher_link import find_launchers

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S, DaemonProcess, end_everything

TRAINERS = Path(__file__).parents[1] / "integration" / "trainers"
SETTINGS = """
heartbeat_timeout_s = 60
kill_patience_s = 2
sweep_s = 0.5
[inventory]
cpus = 2
devices = [{id = "cuda:0"}]
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    root = tmp_path / "home"
    yield Home(root)
    end_everything(root)


@contextlib.contextmanager
def serving(home: Home) -> Iterator[tuple[DaemonProcess, trn.Client]]:
    """A daemon, and a client of it; it is killed at the end, launcher and workers go on."""
    daemon = DaemonProcess(home.root, settings=SETTINGS, is_bare=True)
    daemon.wait_ready()
    try:
        with trn.Client(home.root) as client:
            yield daemon, client
    finally:
        daemon.kill()


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


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_launchers(home: Home) -> None:
    for info in find_launchers(home.launcher):
        os.kill(info.pid, signal.SIGKILL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_attempt_that_a_power_cut_ended_has_its_terminal_event_though_unsynced_files_are_empty(
    home: Home, tmp_path: Path
) -> None:
    with serving(home) as (_, client):
        asked = job(tmp_path, run_id="cut", mock_batches=[1] * 50, hyperparams={"step_ms": 200})
        asked["retry"] = {"backoff_s": 0.01}
        client.submit(asked, base_dir=TRAINERS)
        wait_until(lambda: client.get("cut").step > 0)
        pid = client.details("cut").attempts[-1].pid
    kill_launchers(home)
    os.kill(pid, signal.SIGKILL)
    folder = home.run("cut")
    for path in (folder.job, folder.contract):
        path.write_bytes(b"")
    with serving(home) as (_, client):
        wait_until(lambda: client.get("cut").attempt == 2)
        ended = [line for line in read_lines(folder.events) if line["event"] in ("completed", "failed")]
        assert [(line["attempt"], line["event"]) for line in ended] == [(1, "failed")]
        assert "was not written" not in home.daemon_log.read_text(), "the first try was enough"
        client.cancel("cut")


def back_up(home: Home, folder: Path) -> None:
    assert daemon_main(["--home", str(home.root), "backup", str(folder)]) == 0


def restore(home: Home, folder: Path) -> None:
    """As the operating guide says; the daemon is stopped."""
    for name in ("registry.db", "metrics.db"):
        for left in home.root.glob(f"{name}-*"):
            left.unlink()
        shutil.copy(folder / name, home.root / name)


def test_after_an_older_backup_a_new_run_of_an_old_id_is_trained_and_the_old_folder_moved_aside(
    home: Home, tmp_path: Path
) -> None:
    with serving(home) as (daemon, client):
        back_up(home, tmp_path / "saved")
        client.submit(job(tmp_path, run_id="same"), base_dir=TRAINERS)
        old = client.wait("same", timeout_s=DEADLINE_S)
        assert (old.state, old.metrics["train/loss"]) == ("COMPLETED", 15.0)
        daemon.stop()
    restore(home, tmp_path / "saved")
    with serving(home) as (_, client):
        (warning,) = client.health().warnings
        assert "without a run in the registry: same." in warning
        other = job(tmp_path, run_id="same", mock_batches=[100, 200])
        submitted = client.submit(other, base_dir=TRAINERS).run
        assert submitted.run_id == "same"
        run = client.wait("same", timeout_s=DEADLINE_S)
        assert (run.state, run.step, run.metrics["train/loss"]) == ("COMPLETED", 2, 300.0)
        events = list(client.events("same"))
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        (nonce,) = {event["nonce"] for event in events}

        def copied() -> list[int]:
            lines = [
                line for path in home.logs.root.glob("*/*/*/same.log.jsonl") for line in read_lines(path)
            ]
            return [line["seq"] for line in lines if line.get("nonce") == nonce and "seq" in line]

        wait_until(lambda: copied() == [event["seq"] for event in events])  # beside those of the old run
        (aside,) = home.foreign.iterdir()
        assert read_lines(aside / "metrics" / "events.jsonl")[-1]["step"] == 5, "nothing of it is lost"
        (warning,) = client.health().warnings
        assert str(aside) in warning


def test_a_worker_that_the_restored_registry_does_not_know_keeps_its_slots_and_its_folder_until_it_ends(
    home: Home, tmp_path: Path
) -> None:
    with serving(home) as (_, client):
        back_up(home, tmp_path / "saved")
        slow = job(tmp_path, run_id="same", mock_batches=[1] * 10_000, hyperparams={"step_ms": 50})
        slow["resources"] = {"devices": ["cuda:0"], "cpus": 2}
        client.submit(slow, base_dir=TRAINERS)
        wait_until(lambda: client.get("same").step > 0)
        pid = client.details("same").attempts[-1].pid
    restore(home, tmp_path / "saved")
    with serving(home) as (_, client):
        warnings = client.health().warnings
        assert any(f"process {pid} is a worker" in text and "cuda:0, 2 CPUs" in text for text in warnings)
        (device,) = client.devices().devices
        assert f"process {pid}" in device.quarantine_reason
        assert client.devices().cpus_held == 2
        client.submit(job(tmp_path, run_id="same", mock_batches=[100, 200]), base_dir=TRAINERS)
        client.submit(job(tmp_path, run_id="other", resources={"gpus": 1}), base_dir=TRAINERS)
        wait_until(lambda: f"process {pid}" in client.get("same").reason)
        wait_until(lambda: "waits" in client.get("other").reason or "CPU" in client.get("other").reason)
        assert client.get("other").state == "PENDING"
        os.kill(pid, signal.SIGTERM)
        assert client.wait("other", timeout_s=DEADLINE_S).state == "COMPLETED"
        run = client.wait("same", timeout_s=DEADLINE_S)
        assert (run.state, run.attempt, run.metrics["train/loss"]) == ("COMPLETED", 1, 300.0)
        (warning,) = client.health().warnings
        assert "was moved to" in warning
        assert client.devices().cpus_held == 0
        assert not (tmp_path / "violations").exists()


def test_a_record_that_was_deleted_does_not_start_a_second_worker_beside_the_living_one(
    home: Home, tmp_path: Path
) -> None:
    with serving(home) as (_, client):
        asked = job(tmp_path, run_id="one", mock_batches=[1] * 60, hyperparams={"step_ms": 50})
        client.submit(asked, base_dir=TRAINERS)
        wait_until(lambda: client.get("one").step > 0)
        pid = client.details("one").attempts[-1].pid
    (home.run("one").attempts / "1.json").unlink()
    with serving(home) as (_, client):
        run = client.wait("one", timeout_s=DEADLINE_S)
        assert (run.state, run.attempt, run.step) == ("COMPLETED", 1, 60)
        assert client.details("one").attempts[-1].pid == pid
        assert client.health().warnings == ()
    assert not (tmp_path / "violations").exists()


def test_a_checkpoint_that_another_run_saved_is_not_resumed_from_though_it_is_the_newest(
    home: Home, tmp_path: Path
) -> None:
    with serving(home) as (_, client):
        other = job(tmp_path, run_id="other", mock_batches=[100] * 40, max_steps=30, checkpoint_every=10)
        client.submit(other, base_dir=TRAINERS)
        assert client.wait("other", timeout_s=DEADLINE_S).step == 30
        own = job(
            tmp_path, run_id="own", mock_batches=[1] * 40, checkpoint_every=1, hyperparams={"step_ms": 100}
        )
        client.submit(own, base_dir=TRAINERS)
        folder = home.run("own").checkpoints
        wait_until(lambda: any(folder.glob("step-*.meta.json")))
        for path in home.run("other").checkpoints.glob("step-00000030.*"):
            shutil.copy(path, folder / path.name)
        os.kill(client.details("own").attempts[-1].pid, signal.SIGKILL)
        run = client.wait("own", timeout_s=DEADLINE_S)
        assert (run.state, run.attempt, run.metrics["train/loss"]) == ("COMPLETED", 2, 40.0), run.reason
        said = [event.get("message", "") for event in client.events("own")]
        assert any("it is of run 'other', not of 'own'" in text for text in said)
