"""A real Redis server of a test's own, started, killed and started again."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

DEADLINE_S = 60

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (apt-get install redis-server)"
)


class RedisServer:
    """On a socket in a folder of its own; what it has acknowledged is in its append-only file. A context."""

    def __init__(self) -> None:
        # Not below the test's own folder: a socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="trn-redis-"))
        self.socket = self.folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.client = redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.client.close()
        shutil.rmtree(self.folder)

    def start(self, *options: str, is_loaded: bool = True) -> None:
        """Until it answers; where that need not be with its data, until it says that it loads them."""
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        durable = [
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "no",
            "--enable-debug-command",
            "yes",
        ]
        with (self.folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen([*command, *durable, *options], stdout=output, stderr=output)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            assert self._process.poll() is None, (self.folder / "output.txt").read_text()
            assert time.monotonic() < deadline
            try:
                self.client.ping()
            except redis.BusyLoadingError:
                if not is_loaded:
                    return
            except redis.ConnectionError:
                pass
            else:
                return
            time.sleep(0.01)

    def connect(self) -> "redis.Redis":
        """Another connection, that waits for as long as Redis does not answer."""
        return redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0))

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @staticmethod
    def wait_a_moment() -> None:
        time.sleep(0.05)

    def kill(self) -> None:
        """As a power cut would, for this process alone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(DEADLINE_S)
            self._process = None

    def fill(self, num_keys: int) -> None:
        """Other people's data, in a file that is loaded key by key."""
        for number in range(num_keys):
            self.client.set(f"other-{number}", os.urandom(200))  # what can be compressed would be
        self.client.bgrewriteaof()
        deadline = time.monotonic() + DEADLINE_S
        while self.client.info("persistence")["aof_rewrite_in_progress"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def entries(self, stream: str) -> list[dict[str, str]]:
        """All that a stream holds, oldest first."""
        found: Any = self.client.xrange(stream)
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]

    def told_events(self, stream: str = "trn:events") -> dict[str, list[str]]:
        """The events of each run as a reader has them: what it has seen it drops, by number. No number may be missing."""
        told: dict[str, list[str]] = {}
        for entry in self.entries(stream):
            lines = told.setdefault(entry["run_id"], [])
            seq = int(entry["seq"])
            assert seq <= len(lines) + 1, f"{entry['run_id']}: {seq} comes after {len(lines)}"
            if seq == len(lines) + 1:
                lines.append(entry["data"])
        return told
