"""Runs real workers in folders of their own and reads what they left."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from warm_python import python_folder

from gen_worker.contract.lease import RunLease

TRAINERS = Path(__file__).parent / "trainers"
DEADLINE_S = 240


class WarmParent:
    """The forking process, one per test process; see warm_parent.py. Ends with our end of its pipe."""

    _shared: "WarmParent | None" = None

    def __init__(self) -> None:
        script = Path(__file__).with_name("warm_parent.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @classmethod
    def shared(cls) -> "WarmParent":
        if cls._shared is None:
            cls._shared = cls()
            atexit.register(cls._shared.close)
        return cls._shared

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, request: dict[str, Any]) -> int:
        return self.wait(self.start(request))

    def start(self, request: dict[str, Any]) -> int:
        """The pid of a worker. Somebody has to `wait` for it."""
        self._send(request)
        return int(self._read()["pid"])

    def wait(self, pid: int) -> int:
        """Its exit code. It is killed if it takes too long."""
        guard = threading.Timer(DEADLINE_S, os.kill, (pid, signal.SIGKILL))
        guard.start()
        try:
            self._send({"wait": pid})
            return int(self._read()["code"])
        finally:
            guard.cancel()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


class Run:
    """One run's folder, and the ways to start workers on it."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.job: dict[str, Any] = {
            "trainer_api_version": "v1",
            "run_id": "run-1",
            "trainer": "counting:Counting",
            **job,
        }

    @property
    def events_path(self) -> Path:
        return self.folder / "artifacts" / "metrics" / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "artifacts" / "checkpoints"

    def command(self, **env: str) -> tuple[list[str], dict[str, str]]:
        (self.folder / "job.json").write_text(json.dumps(self.job))
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": os.environ["TORCHINDUCTOR_CACHE_DIR"],
            "PYTHONPATH": str(TRAINERS),
            "WORKER_MODE": "trainer",
            "TRAINER_JOB_SPEC_PATH": str(self.folder / "job.json"),
            "TRAINER_ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **env,
        }
        return [sys.executable, "-m", "gen_worker.entrypoint"], environ

    def start(self, **env: str) -> subprocess.Popen[str]:
        """A worker started as an operator would, from a cold interpreter; the caller waits for it."""
        command, environ = self.command(**env)
        return subprocess.Popen(
            command, env=environ, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def work(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one worker to its end, forked from a process that has the heavy imports done."""
        is_one = self.job.get("resources", {}).get("processes", 1) == 1 and "TRAINER_ISOLATED" not in env
        if not is_one:  # torchrun, its processes and an isolated trainer are forked, too
            env["PYTHON_EXEC"] = f"{python_folder()}/python"
        command, environ = self.command(**env)
        stdout, stderr = self.folder / "stdout.log", self.folder / "stderr.log"
        request = {
            "env": environ,
            "cwd": str(self.folder),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        code = WarmParent.shared().run(request)
        return subprocess.CompletedProcess(command, code, stdout.read_text(), stderr.read_text())

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        if not self.events_path.exists():
            return []
        found = [json.loads(line) for line in self.events_path.read_text().splitlines()]
        return [event for event in found if not kinds or event["event"] in kinds]

    def losses(self) -> dict[int, float]:
        """step -> loss, the newest attempt's word for each step."""
        found: dict[int, float] = {}
        for event in self.events("metric", "metrics"):
            values = event.get("values") or {event["name"]: event["value"]}
            if "train/loss" in values:
                found[event["step"]] = values["train/loss"]
        return found

    def wait_for_writer(self) -> None:
        """After a kill: until the checkpoint writer that was left behind has finished."""
        RunLease.acquire(self.checkpoints, run_id=self.job["run_id"]).release()

    def check_invariants(self) -> None:
        """What must hold after any history of crashes and resumes."""
        events = self.events()
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        attempts: dict[int, int] = {}
        for event in events:
            attempts.setdefault(event["attempt"], 0)
            attempts[event["attempt"]] += event["event"] in ("completed", "failed")
        assert all(count <= 1 for count in attempts.values()), attempts
        for meta in self.checkpoints.glob("*.meta.json"):
            assert json.loads(meta.read_text())["schema_version"] == "trainer_checkpoint.v1"


def write_rows(path: Path, *, num_rows: int = 100, row_group_size: int = 17, seed: int = 0) -> Path:
    """A regression data set with columns `x` (float32[4]) and `y` (float32)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_rows, 4)).astype("float32")
    table = pa.table(
        {
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
            "y": pa.array((x.sum(axis=1) + 0.1).astype("float32")),
        }
    )
    pq.write_table(table, path, row_group_size=row_group_size)
    return path
