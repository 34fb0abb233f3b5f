"""Runs in processes of their own that take turns: each is timed a stretch at a time and waits in between.

`TimedRun` starts a run and asks it for stretches. In the run, `Stretches.tick` is called before every step, in the
main process: between two stretches it waits there, and with it all processes of the run, which costs nobody anything.
So two runs can be measured within the same second, however long each takes to start.
"""

import atexit
import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import HERE, Sample

VARIABLE = "BENCH_STRETCHES"
CONNECT_TIMEOUT_S = 90.0
END_TIMEOUT_S = 15.0
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`num_stretches` of `steps` each; before each one `warm_steps`, at least 1, that are not timed."""

    num_stretches: int
    warm_steps: int
    steps: int

    @property
    def total_steps(self) -> int:
        """After which nobody waits any more."""
        return self.num_stretches * (self.warm_steps + self.steps)


class Stretches:
    """In the run. Where no `TimedRun` started it, a tick does nothing."""

    def __init__(self) -> None:
        self._left = -1
        given = os.environ.get(VARIABLE)
        if given is None:
            return
        found = json.loads(given)
        self._plan = Plan(**found["plan"])
        self._num_done = 0
        self._is_warm = False
        self._started_s = self._started_cpu_s = 0.0
        self._started_faults = 0
        self._connection = socket.create_connection(("127.0.0.1", found["port"]))
        self._requests = self._connection.makefile("rb")
        self._wait_request()

    def tick(self) -> None:
        """A step is about to begin."""
        self._left -= 1
        if self._left == 0:
            self._turn()

    def _turn(self) -> None:
        if not self._is_warm:
            self._is_warm, self._left = True, self._plan.steps
            self._started_faults = _num_page_faults()
            self._started_cpu_s, self._started_s = time.process_time(), time.perf_counter()
            return
        wall_s, cpu_s = time.perf_counter() - self._started_s, time.process_time() - self._started_cpu_s
        steps = self._plan.steps
        answer = {
            "step_us": 1e6 * wall_s / steps,
            "cpu_us": 1e6 * cpu_s / steps,
            "page_faults": (_num_page_faults() - self._started_faults) / steps,
        }
        self._connection.sendall(json.dumps(answer).encode() + b"\n")
        self._num_done += 1
        if self._num_done < self._plan.num_stretches:
            self._wait_request()

    def _wait_request(self) -> None:
        if not self._requests.readline():
            raise RuntimeError("nobody asks for another stretch")
        self._is_warm, self._left = False, self._plan.warm_steps


def _num_page_faults() -> int:
    """Memory that is given back and asked for again at every step shows here."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class TimedRun:
    """The other end. Ends the run when this interpreter ends."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], plan: Plan, *, log_path: Path
    ) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        given = json.dumps({"port": server.getsockname()[1], "plan": asdict(plan)})
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(HERE), **environ, VARIABLE: given},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self._end)
        with server:
            self._connection = self._accept(server)
        self._answers = self._connection.makefile("rb")

    def run_stretch(self) -> Sample:
        """A request, and when the run has done its steps, what they took."""
        self._connection.sendall(b"stretch\n")
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the run ended: {self._last_words()}")
        sample: Sample = json.loads(line)
        return sample

    def _accept(self, server: socket.socket) -> socket.socket:
        server.settimeout(LOOK_EVERY_S)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the run did not get to its first step: {self._last_words()}"
                    ) from None
            else:
                connection.settimeout(None)
                return connection

    def _last_words(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        spoken = (line.strip() for line in reversed(lines) if any(char.isalpha() for char in line))
        return next(spoken, "it said nothing")

    def _end(self) -> None:
        """The run ends by itself after its last stretch, or as nobody asks for another one."""
        with suppress(AttributeError):  # it never got there
            self._answers.close()
            self._connection.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
