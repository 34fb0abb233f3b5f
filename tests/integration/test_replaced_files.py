"""Claims about a run's folder whose files somebody has replaced: the daemon answers, and every run still ends."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from daemon_process import DEADLINE_S, DaemonProcess, end_everything, worker_record

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from click.testing import CliRunner
from replaced_files import KINDS, put_in_place

import trn
from trn.cli.command_table import group
from trn.core.errors import TrnError
from trn.core.home import RunFolder
from trn.core.runs import RunState

TRAINERS = Path(__file__).parent / "trainers"
SETTINGS = """
heartbeat_timeout_s = 60
kill_patience_s = 2
sweep_s = 0.2
min_free_bytes = 1000000
[inventory]
cpus = 32
memory_mb = 1000000
devices = []
"""
# Every file of a run that the daemon or the command line reads, by name.
FILES: dict[str, Callable[[RunFolder], Path]] = {
    "events": lambda folder: folder.events,
    "log": lambda folder: folder.log,
    "record": lambda folder: folder.attempts / "1.json",
    "exit": lambda folder: folder.attempts / "1.exit.json",
    "contract": lambda folder: folder.contract,
    "job": lambda folder: folder.job,
    "report": lambda folder: folder.report,
    "meta": lambda folder: folder.checkpoints / "step-00000001.meta.json",
    "data": lambda folder: folder.checkpoints / "step-00000001.pt",
    "damaged": lambda folder: folder.damaged_events,
}


def job(tmp_path: Path, name: str, **options: Any) -> dict[str, Any]:
    return {
        "run_id": name,
        "trainer": "witnessed:Witnessed",
        "mock_batches": [1, 2],
        "metric_every": 1,
        "checkpoint_every": 1,
        "retry": {"max_attempts": 1},
        "grace_s": 1.0,
        "resources": {"devices": ["cpu"]},
        "hyperparams": {"witness": str(tmp_path), "name": name, **options},
    }


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.02)


def test_whatever_is_in_the_place_of_a_file_of_an_ended_run_freezes_nobody(tmp_path: Path) -> None:
    home = tmp_path / "home"
    daemon = DaemonProcess(home, settings=SETTINGS, is_bare=True)
    daemon.wait_ready()
    replaced: dict[str, str] = {}
    try:
        with trn.Client(home) as client:
            for name in FILES:
                client.submit(job(tmp_path, name), base_dir=TRAINERS)
            for name in FILES:
                assert client.wait(name).state == RunState.COMPLETED
        daemon.kill()
        for (name, path), kind in zip(FILES.items(), itertools.cycle(KINDS), strict=False):
            put_in_place(path(daemon.home.run(name)), kind)
            replaced[name] = kind
        daemon = DaemonProcess(home, is_bare=True)
        daemon.wait_ready()
        with trn.Client(home) as client:
            for name in replaced:
                with contextlib.suppress(TrnError):
                    list(client.events(name))
                with contextlib.suppress(TrnError):
                    list(client.logs(name))
                with contextlib.suppress(TrnError):
                    client.wait(client.resume(name).run.run_id)
                assert client.get(name).state == RunState.COMPLETED, replaced
            client.submit(job(tmp_path, "after"), base_dir=TRAINERS)
            assert client.wait("after").state == RunState.COMPLETED
        for name in replaced:
            for command in (
                ["logs", name, "--json"],
                ["status", name],
                ["why", name],
                ["compare", name, "after"],
            ):
                done = CliRunner().invoke(group, ["--home", str(home), *command])
                assert done.exception is None or isinstance(done.exception, SystemExit | TrnError), (
                    name,
                    command,
                    done,
                )
    finally:
        end_everything(home)


@pytest.mark.parametrize("is_daemon_there", [True, False])
def test_a_worker_whose_events_are_replaced_is_left_alone_and_its_run_ends(
    tmp_path: Path, is_daemon_there: bool
) -> None:
    home = tmp_path / "home"
    daemon = DaemonProcess(home, settings=SETTINGS, is_bare=True)
    daemon.wait_ready()
    names = [f"run-{index}" for index in range(len(KINDS))]
    try:
        with trn.Client(home) as client:
            for name in names:
                client.submit(job(tmp_path, name, step_ms=1_000_000), base_dir=TRAINERS)
            for name in names:
                wait_until(lambda name=name: client.get(name).state == RunState.RUNNING, "the run")
                wait_until(lambda name=name: daemon.home.run(name).events.exists(), "its events")
        pids = []
        for name in names:
            record = worker_record(daemon, name)
            pids.append(record.pid)
        if not is_daemon_there:
            daemon.kill()
        for name, kind in zip(names, KINDS, strict=True):
            put_in_place(daemon.home.run(name).events, kind)
        if not is_daemon_there:
            daemon = DaemonProcess(home, is_bare=True)
            daemon.wait_ready()
        with trn.Client(home) as client:
            client.submit(job(tmp_path, "after"), base_dir=TRAINERS)
            assert client.wait("after").state == RunState.COMPLETED
            assert all(psutil.pid_exists(pid) for pid in pids)
            for name in names:
                client.cancel(name, "enough")
            for name in names:
                assert client.wait(name).state == RunState.CANCELLED
    finally:
        end_everything(home)
