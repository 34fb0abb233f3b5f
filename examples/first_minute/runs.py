"""The demo's home and its runs, through the command line: `trn run` starts a daemon, submits, and prints JSON lines."""

import contextlib
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
TRN = Path(sys.executable).with_name("trn")
LOOK_EVERY_S = 0.02
STOP_WITHIN_S = 20.0


class RunFailedError(Exception):
    """A run failed; the message is trn's own."""


class DemoHome:
    """The demo's own `TRN_HOME`. At the end of the `with` block no process of it runs, unless the page was opened."""

    def __init__(self, out: Path) -> None:
        self.root = out / "home"
        self.log = out / "trn.log"
        # Caches of torch and the feed stay in the demo's folder; TRAINER_ variables of the shell are not inherited.
        own = {
            "TRN_HOME": str(self.root),
            "TRN_CACHE_DIR": str(out / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(out / "cache" / "torch"),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
        self._environ = {**inherited, **own}
        self._is_page_open = False

    def __enter__(self) -> "DemoHome":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self._is_page_open:
            self.stop()

    def open_page(self, path: str) -> str:
        """Start the page, and return a link to `path` of it. The link logs a browser in, once."""
        with self._start("ui", "--json") as starting:
            answer, _ = starting.communicate()
        if starting.returncode != 0:
            raise RunFailedError(f"the page did not start: see {self.log}")
        self._is_page_open = True
        url: str = json.loads(answer)["url"]
        return url.replace("/#", f"{path}#", 1)

    def stop(self) -> None:
        """End the daemon, the page, the launcher and all workers."""
        with self._start("daemon", "stop") as stopping:
            stopping.communicate()
        asked: set[int] = set()
        deadline = time.monotonic() + STOP_WITHIN_S
        while ours := self._processes():  # also processes that were just started
            is_late = time.monotonic() > deadline
            for pid in ours if is_late else ours - asked:
                _send(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            asked |= ours
            time.sleep(LOOK_EVERY_S)

    def _processes(self) -> set[int]:
        """The daemon, the gateway, the launcher and the workers of this home."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                is_part = any(
                    part in command for part in (b"\0trn.daemon\0", b"\0trn.gateway\0", b"\0gen_worker.")
                )
                if is_part and os.fsencode(self.root) in command and _lives(int(folder.name)):
                    found.add(int(folder.name))
        return found

    def run(self, job: Path) -> "subprocess.Popen[bytes]":
        """`trn run` of that job, with the code of this folder. In its own session, so that Ctrl-C reaches only the demo."""
        return self._start("run", "--json", "--code", str(HERE), "--config", str(job))

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [TRN, *words], env=self._environ, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )


class Run:
    """One run: its job, its folder in the home, and its events."""

    def __init__(self, out: Path, name: str) -> None:
        self.name = name
        self.job_path = out / "jobs" / f"{name}.json"
        self.folder = out / "home" / "runs" / name
        self.events_path = self.folder / "metrics" / "events.jsonl"
        self.final_checkpoint = self.folder / "checkpoints" / "final.pt"

    def write_job(self, job: dict[str, Any]) -> None:
        self.job_path.parent.mkdir(parents=True, exist_ok=True)
        self.job_path.write_text(json.dumps({"run_id": self.name, **job}, indent=2) + "\n")

    def follow(self, home: DemoHome) -> Iterator[dict[str, Any]]:
        """Submit it, and yield the JSON lines of `trn run`. RunFailedError if it fails."""
        process = home.run(self.job_path)
        assert process.stdout is not None
        last: dict[str, Any] = {}
        try:
            for line in process.stdout:
                last = json.loads(line)
                yield last
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(
                        signal.SIGINT
                    )  # in a pipe, this cancels the run and waits for its end
            process.stdout.close()
            try:
                process.wait(STOP_WITHIN_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()
                process.wait()
        if process.returncode != 0:
            words = "; ".join(last.get("faults", [])) or last.get("reason") or f"see {home.log}"
            raise RunFailedError(f"run {self.name}: {words}")

    def kill_worker(self, attempt: int) -> None:
        """SIGKILL, as the OOM killer sends it: the worker cannot save anything."""
        record = json.loads((self.folder / "attempts" / f"{attempt}.json").read_bytes())
        _send(record["pid"], signal.SIGKILL)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.events_path.read_text().splitlines()]

    def losses(self) -> dict[int, list[float]]:
        """step -> its loss, once per attempt that computed it."""
        found: dict[int, list[float]] = {}
        for event in self.events():
            if event["event"] == "metrics":
                found.setdefault(event["step"], []).append(event["values"]["train/loss"])
        return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lives(pid: int) -> bool:
    """Zombies do not count: in many containers PID 1 does not reap orphans."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
