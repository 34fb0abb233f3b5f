"""A real daemon whose files are not what it left: lost in a power cut, deleted, or of another submission."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trn
from trn.core.home import Home
from trn.executors.launcher_process import find_launchers

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
    daemon = DaemonProcess(home.root, settings=SETTINGS)
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
