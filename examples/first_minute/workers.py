"""A run's folder, its worker processes, and what they write to `events.jsonl` while they work."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOOK_EVERY_S = 0.02
STOP_WITHIN_S = 3.0
SAVE_WITHIN_S = 30.0


class WorkerFailedError(Exception):
    """A worker ended in a way nobody asked for; the message is the worker's own."""


class Run:
    """One run: its job, its artifacts, and the workers that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifacts = folder / "artifacts"
        self.events_path = self.artifacts / "metrics" / "events.jsonl"
        self.final_checkpoint = self.artifacts / "checkpoints" / "final.pt"
        self.job_path = folder / "job.json"

    def write_job(self, job: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True)
        self.job_path.write_text(json.dumps({"run_id": self.folder.name, **job}, indent=2) + "\n")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.events_path.read_text().splitlines()]

    def losses(self) -> dict[int, list[float]]:
        """step -> its loss, once per attempt that computed it."""
        found: dict[int, list[float]] = {}
        for event in self.events():
            if event["event"] == "metrics":
                found.setdefault(event["step"], []).append(event["values"]["train/loss"])
        return found


class Worker:
    """One worker process, in a process group of its own; leaving the `with` block leaves nothing running."""

    def __init__(self, run: Run, number: int, environ: dict[str, str]) -> None:
        self._run = run
        self.log_path = run.folder / f"worker-{number}.log"
        self._offset = run.events_path.stat().st_size if run.events_path.exists() else 0
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gen_worker.entrypoint"],
                cwd=HERE,  # where `trainer:DigitTrainer` is found
                env={
                    # What a shell was told for another worker is not meant for this one.
                    **{name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")},
                    **environ,
                    "WORKER_MODE": "trainer",
                    "TRAINER_JOB_SPEC_PATH": str(run.job_path),
                    "TRAINER_ARTIFACTS_DIR": str(run.artifacts),
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(STOP_WITHIN_S)
            self._wait_for_group()
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # it is too slow, or the user is in a hurry
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def follow(self) -> Iterator[dict[str, Any]]:
        """This worker's events as they come, until it has ended."""
        while True:
            has_ended = self._process.poll() is not None
            yield from self._new_events()
            if has_ended:
                return
            time.sleep(LOOK_EVERY_S)

    def kill(self) -> None:
        """What a power cut, the OOM killer or an impatient operator does: no goodbye."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def check(self, *, killed: bool) -> None:
        """WorkerFailedError, unless the worker ended the way it should have."""
        code = self._process.wait()
        if killed and code == 0:
            raise WorkerFailedError("the worker had finished before it could be killed: run the demo again")
        if code != (-signal.SIGKILL if killed else 0):
            raise WorkerFailedError(f"the worker ended with exit code {code}: {self._last_words()}")

    def _new_events(self) -> Iterator[dict[str, Any]]:
        if not self._run.events_path.exists():
            return
        with self._run.events_path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1  # a line counts once its newline is there
        self._offset += whole
        for line in content[:whole].splitlines():
            yield json.loads(line)

    def _last_words(self) -> str:
        if self._run.events_path.exists():
            failed = [event for event in self._run.events() if event["event"] == "failed"]
            if failed:
                return f"{failed[-1]['category']}: {failed[-1]['error']}"
        lines = self.log_path.read_text(errors="replace").splitlines()
        own = [number for number, line in enumerate(lines) if line.startswith("gen_worker: ")]
        return "\n".join(lines[own[-1] :]) if own else f"see {self.log_path}"

    def _wait_for_group(self) -> None:
        """A killed worker's checkpoint writer finishes its save and ends by itself; give it that time."""
        deadline = time.monotonic() + SAVE_WITHIN_S
        while self._group_lives():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._process.args, SAVE_WITHIN_S)
            time.sleep(LOOK_EVERY_S)

    def _group_lives(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        stats = [_read_stat(path) for path in Path("/proc").glob("[0-9]*/stat")]
        # Where nothing reaps orphans (PID 1 of many containers), the ended ones stay as zombies: they do not count.
        return not stats or any(
            stat[2] == str(self._process.pid) and stat[0] != "Z" for stat in stats if len(stat) > 2
        )


def _read_stat(path: Path) -> list[str]:
    """State, parent, process group, … of a process; empty if it is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
