"""Runs for a real launcher: their folders, their plans, and what their workers left."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gen_worker.contract.process_identity import ProcessIdentity, is_same_process
from gen_worker.launcher.messages import LauncherInfo
from trn.core.home import Home, RunFolder
from trn.executors.base import AttemptKey, LaunchPlan, Worker
from trn.executors.local.launcher_link import find_launchers

TRAINERS = Path(__file__).parent / "trainers"
DEADLINE_S = 120.0


class LaunchedRun:
    """One run in a home."""

    def __init__(self, home: Home, run_id: str, **job: Any) -> None:
        self.run_id = run_id
        self.folder: RunFolder = home.run(run_id)
        self.folder.attempts.mkdir(parents=True)
        self.job: dict[str, Any] = {
            "trainer_api_version": "v1",
            "run_id": run_id,
            "trainer": "counting:Counting",
            "mock_batches": [1, 2, 3],
            **job,
        }
        self.folder.job.write_text(json.dumps(self.job))
        contract = {
            "contract_version": "v1",
            "trainer_plugin": self.job["trainer"],
            "job_spec_path": str(self.folder.job),
            "arrow_ipc_path": None,
            "checkpoints_dir": str(self.folder.checkpoints),
            "samples_dir": str(self.folder.samples),
            "events_path": str(self.folder.events),
            "extra_env": {},
        }
        self.folder.contract.write_text(json.dumps(contract))

    def plan(self, number: int = 1, *, code: Path = TRAINERS, **changes: Any) -> LaunchPlan:
        env = {
            "WORKER_MODE": "trainer",
            "TRAINER_CONTRACT_PATH": str(self.folder.contract),
            "TRAINER_ATTEMPT": str(number),
            **changes.pop("env", {}),
        }
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "number": number,
            "argv": (sys.executable, "-P", "-m", "gen_worker.entrypoint"),
            "env": env,
            "cwd": str(self.folder.root),
            "code_dir": str(code),
            "log_path": str(self.folder.log),
            "attempt_dir": str(self.folder.attempts),
            "checkpoints_dir": str(self.folder.checkpoints),
            "events_path": str(self.folder.events),
            "trainer": self.job["trainer"],
            "is_warm": True,
        }
        return LaunchPlan(**{**fields, **changes})

    def key(self, number: int = 1) -> AttemptKey:
        return AttemptKey(self.run_id, number)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        if not self.folder.events.exists():
            return []
        found = [json.loads(line) for line in self.folder.events.read_text().splitlines()]
        return [event for event in found if not kinds or event["event"] in kinds]

    def log(self) -> str:
        return self.folder.log.read_text() if self.folder.log.exists() else ""


def living(home: Home) -> list[LauncherInfo]:
    return find_launchers(home.launcher)


def runs(info: LauncherInfo) -> bool:
    return is_same_process(info.pid, info.start_ticks, info.boot_id)


def is_running(worker: Worker) -> bool:
    return ProcessIdentity.of(worker.ref).is_alive()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)


async def until(is_so: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_until, is_so, what)


def stop_launchers(home: Home) -> None:
    """At the end of a test: none is left, and no worker either (they are the tests' to end)."""
    infos = living(home)
    for info in infos:
        os.kill(info.pid, signal.SIGKILL)
    for info in infos:
        wait_until(lambda info=info: not runs(info), "the launcher's end")
