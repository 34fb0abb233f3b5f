"""`trn` as people and programs start it: in a pipe, and at a terminal of its own, with the keys that they press."""

import codecs
import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from virtual_screen import VirtualScreen

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from daemon_process import DEADLINE_S

TRN = str(Path(sys.executable).with_name("trn"))
WITNESSED = Path(__file__).parents[1] / "integration" / "trainers" / "witnessed.py"
COLUMNS = 100
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def write_job(folder: Path, num_batches: int = 5, *, step_ms: int = 0, **more: Any) -> Path:
    """A job whose loss is the sum of its batches so far: what is lost or done twice shows in it."""
    witness = folder / "witness"
    witness.mkdir(exist_ok=True)
    (folder / ".trnignore").write_text("witness/\n")  # it is written to by the runs, and no code
    hyperparams = {"witness": str(witness), "step_ms": step_ms, **more.pop("hyperparams", {})}
    job = {
        "trainer": "witnessed:Witnessed",
        "mock_batches": list(range(1, num_batches + 1)),
        "metric_every": 1,
        "resources": {"devices": ["cpu"]},
        "hyperparams": hyperparams,
        **more,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def environ(home: Path) -> dict[str, str]:
    return {**os.environ, "TRN_HOME": str(home), "TERM": "xterm-256color"}


def trn(home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TRN, *map(str, words)],
        env=environ(home),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def read_lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def start(home: Path, *words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [TRN, *map(str, words)],
        env=environ(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process: "subprocess.Popen[str]", event: str) -> list[dict[str, Any]]:
    """The objects up to the first `event`."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == event:
            return seen
    raise AssertionError(f"no {event} in {seen}")


def read_rest(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """What came since, until its end. Not by `communicate`, which knows nothing of what was read ahead."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        lines = [json.loads(line) for line in process.stdout]
    process.wait(DEADLINE_S)
    return lines


def seqs(lines: list[dict[str, Any]]) -> list[int]:
    return [line["seq"] for line in lines if "seq" in line]


def losses(lines: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["value"] for line in lines if line.get("name") == "train/loss"}


class Terminal:
    """`trn` at a terminal of its own: what a person sees, and the keys that they press."""

    def __init__(self, home: Path, *words: object) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [TRN, *map(str, words)],
            env=environ(home),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - no threads here
        )
        os.close(slave)
        self.seen = ""
        self.screen = VirtualScreen(COLUMNS)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until that is to be seen, after what was waited for before."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in\n{self.seen}"
            assert self._read(), f"it ended without {text!r}:\n{self.seen}"
        self.seen = self.seen.partition(text)[2]

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> tuple[int, str]:
        """(exit code, what was seen last)."""
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait(DEADLINE_S), self.seen

    def _read(self) -> bool:
        if not select.select([self._master], [], [], DEADLINE_S)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # nobody has the other side any more
            return False
        text = self._decoder.decode(data)
        self.screen.write(text)
        self.seen += ESCAPES.sub("", text).replace("\r\n", "\n")
        return bool(data)
