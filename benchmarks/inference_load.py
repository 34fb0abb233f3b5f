"""A server under measurement, and the load on it: wrk, from Debian."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import HERE, Sample, SideError

START_S = 90.0
POLL_S = 0.05
DELAY_S = 0.05  # of a batch that clients leave
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class Server:
    """A process, and all that it started: they are one session."""

    process: subprocess.Popen[str]
    port: int

    def cpu_s(self) -> float:
        """Of all its processes that live."""
        return sum(_cpu_s(pid) for pid in self.pids())

    def memory_mb(self) -> float:
        """What its processes hold: what they share is counted once."""
        return sum(_pss_mb(pid) for pid in self.pids())

    def pids(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if int(_stat(int(entry.name))[3]) == self.process.pid:
                        found.append(int(entry.name))
        return found

    def read_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SideError("the server ended")
        document: dict[str, Any] = json.loads(line)
        return document


@contextlib.contextmanager
def running(command: Sequence[str], *, port: int = 0) -> Iterator[Server]:
    """`port` 0: its first line says it."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    server = Server(process=process, port=port)
    try:
        if not port:
            server.port = server.read_line()["port"]
        else:
            _await_port(server)
        yield server
    finally:
        for pid in server.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise SideError(f"the server ended with the exit code {server.process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return
        time.sleep(POLL_S)
    raise SideError(f"the server did not listen within {START_S:g} s")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What wrk asks for."""

    path: str = "/predict"
    body: str = ""  # a file; none: GET
    content_type: str = "application/json"
    bearer: str = ""
    connections: int = 32
    seconds: float = 3.0

    def start(self, server: Server | None = None, *, port: int = 0) -> "subprocess.Popen[str]":
        """At that server, or that port of a server that somebody else started."""
        wrk = shutil.which("wrk")
        if wrk is None:
            raise SideError("there is no wrk: apt-get install wrk")
        environment = {**os.environ, "LOAD_METHOD": "POST" if self.body else "GET"}
        if self.body:
            environment |= {"LOAD_BODY": self.body, "LOAD_TYPE": self.content_type}
        if self.bearer:
            environment["LOAD_BEARER"] = self.bearer
        seconds = max(1, round(self.seconds))
        command = [
            wrk,
            "-t1",
            f"-c{self.connections}",
            f"-d{seconds}s",
            "-s",
            str(HERE / "inference_load.lua"),
        ]
        url = f"http://127.0.0.1:{port if server is None else server.port}{self.path}"
        return subprocess.Popen([*command, url], env=environment, stdout=subprocess.PIPE, text=True)

    def stop(self, wrk: "subprocess.Popen[str]") -> dict[str, float]:
        """End it now: what was measured until then."""
        if wrk.poll() is not None:
            raise SideError("the load ended before it was stopped")
        wrk.send_signal(signal.SIGINT)
        return self.finish(wrk)

    def finish(self, wrk: "subprocess.Popen[str]") -> dict[str, float]:
        output, _ = wrk.communicate()
        line = next((line for line in output.splitlines() if line.startswith('{"requests"')), None)
        if line is None:
            raise SideError(f"wrk failed: {output[-200:]}")
        found: dict[str, float] = json.loads(line)
        return found

    def run(self, server: Server) -> Sample:
        """All answers have to be good ones."""
        before = server.cpu_s()
        found = self.finish(self.start(server))
        cpu_s = server.cpu_s() - before
        if found["failed"] or not found["requests"]:
            raise SideError(f"{found['failed']:g} of {found['requests']:g} requests failed")
        return {
            "per_s": 1e6 * found["requests"] / found["duration_us"],
            "p50_ms": found["p50_us"] / 1000,
            "p99_ms": found["p99_us"] / 1000,
            "cpu_us": 1e6 * cpu_s / found["requests"],
        }


def _stat(pid: int) -> list[str]:
    """What follows the name: state, parent, group, session, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _cpu_s(pid: int) -> float:
    try:
        found = _stat(pid)
    except OSError:
        return 0.0
    return (int(found[11]) + int(found[12])) * TICK_S


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
