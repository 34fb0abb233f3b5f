"""A home whose runs are the test's: it writes their events and output as workers would, and has them copied."""

import contextlib
import json
import logging
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract import failpoints
from trn.core.causes import Cause
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunState
from trn.core.settings import Settings
from trn.daemon.outlets.log_copier import LogCopier
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import Ending, NewRun
from trn.registry.sqlite import RunRegistry

DAY_MS = 24 * 3600 * 1000
NOON_MS = 20_000 * DAY_MS + DAY_MS // 2
MOST_ROUNDS = 10_000


class LoggedRuns:
    """One home, opened and closed as daemons come and go. `now_ms` is what its clock says."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.home = Home(root)
        self.home.make()
        self.settings = msgspec.structs.replace(Settings(min_free_bytes=0), **settings)
        self.now_ms = NOON_MS
        self.now = 0.0
        self._seqs: dict[str, int] = {}
        self._registry: RunRegistry | None = None
        # As the first daemon does: later ones go on from what it has seen.
        self.copy()

    @property
    def registry(self) -> RunRegistry:
        if self._registry is None:
            self._registry = RunRegistry(self.home.registry, clock_ms=lambda: self.now_ms)
        return self._registry

    def close(self) -> None:
        if self._registry is not None:
            self._registry.close()
            self._registry = None

    @contextlib.contextmanager
    def copier(self) -> Iterator[LogCopier]:
        copier = LogCopier(
            registry=self.registry,
            files=Pools({LOCAL_POOL: LocalFiles(self.home)}),
            home=self.home,
            settings=self.settings,
            clock_ms=lambda: self.now_ms,
            clock=lambda: self.now,
        )
        try:
            yield copier
        finally:
            copier.close()

    def copy(self) -> list[str]:
        """A daemon comes, copies all that there is, and goes; what it warned of."""
        with self.copier() as copier:
            copy_all(copier)
            return copier.warnings

    def copy_and_die(self, failpoint: str) -> bool:
        """The same in a process of its own, which may be killed there; whether it was."""
        self.close()
        pid = os.fork()
        if pid == 0:
            try:
                failpoints.arm(failpoint)
                self.copy()
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return True
        assert os.WEXITSTATUS(status) == 0
        return False

    def copy_in_little_room(self, max_file_bytes: int) -> None:
        """The same where no file can grow beyond that: writes stop in the middle, of logs and of the registry."""
        self.close()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
                logging.disable(logging.CRITICAL)
                self.copy()
            os._exit(0)
        os.waitpid(pid, 0)

    def submit(self, run_id: str, **more: Any) -> None:
        new = NewRun(run_id=run_id, digest=run_id, config={"name": run_id}, name=run_id, **more)
        self.registry.submit(new).result()

    def start(self, run_id: str) -> int:
        """Another attempt; its number."""
        number = self.registry.claim(run_id, []).result().number
        self.registry.launched(run_id, number, worker="b/1/1", pid=1).result()
        folder = self.home.run(run_id)
        folder.attempts.mkdir(parents=True, exist_ok=True)
        size_bytes = folder.log.stat().st_size if folder.log.exists() else 0
        (folder.attempts / f"{number}.json").write_text(json.dumps({"pid": 1, "log_offset": size_bytes}))
        return number

    def say(self, run_id: str, *events: str, attempt: int = 1, **fields: Any) -> None:
        """Events of the run, as its worker writes them and the daemon takes them in."""
        path = self.home.run(run_id).events
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            for event in events:
                self._seqs[run_id] = self._seqs.get(run_id, 0) + 1
                head = {"schema_version": "trainer_event.v1", "event": event, "seq": self._seqs[run_id]}
                tail = {"run_id": run_id, "attempt": attempt, "timestamp_ms": NOON_MS, "step": 1, **fields}
                file.write(msgspec.json.encode({**head, **tail}) + b"\n")
        self.registry.follow(
            run_id,
            attempt,
            offset=path.stat().st_size,
            last_seq=self._seqs[run_id],
            step=self._seqs[run_id],
            heartbeat_ms=0,
            metrics={"train/loss": 0.5},
        ).result()

    def print(self, run_id: str, output: bytes) -> None:
        path = self.home.run(run_id).log
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(output)

    def end(self, run_id: str, state: RunState = RunState.COMPLETED, attempt: int = 1) -> None:
        self.registry.end(run_id, attempt, Ending(state=state, cause=Cause(id="completed"))).result()

    def train(self, run_id: str, *, num_events: int = 3, output: bytes = b"", **more: Any) -> None:
        """A whole run, from its submit to its end."""
        self.submit(run_id, **more)
        self.start(run_id)
        self.say(run_id, "started", *["metric"] * num_events)
        self.print(run_id, output)
        self.say(run_id, "completed", final_checkpoint="/checkpoints/final.meta.json")
        self.end(run_id)

    def events(self, run_id: str) -> list[bytes]:
        return self.home.run(run_id).events.read_bytes().splitlines()

    def day_log(self, run_id: str, root: Path | None = None) -> list[dict[str, Any]]:
        """All lines of the run below the folder, in the order of the files."""
        root = root or self.home.logs.root
        paths = sorted(root.glob(f"*/*/*/{run_id}[.~]*jsonl"), key=log_order)
        return [line for path in paths for line in read_lines(path)]

    def index(self, root: Path | None = None) -> list[tuple[str, str]]:
        root = root or self.home.logs.root
        paths = sorted((root / "jobs").iterdir(), key=log_order)
        return [(line["run_id"], line["event"]) for path in paths for line in read_lines(path)]


def copy_all(copier: LogCopier) -> None:
    """Until there is nothing to do at once."""
    for _ in range(MOST_ROUNDS):
        if copier.copy() != 0:
            return
    raise AssertionError("it does not come to an end")


def log_order(path: Path) -> tuple[str, float]:
    """By day, then as they were begun: the one without a number is the newest."""
    number = re.search(r"[.~](\d+)(\.log)?\.jsonl$", path.name)
    return str(path.parent), float(number[1]) if number else float("inf")


def read_whole_lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data, f"{path} ends with half a line"
    return data.splitlines()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """As a collector reads a log: a line that is not JSON is dropped."""
    lines = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def drop_repeats(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As docs/logs.md tells readers to do it: by the key. A repeat says the same, except when it was copied."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        number = line.get("seq", line.get("offset", 0))
        known = first.setdefault((line["run_id"], line.get("nonce"), line["event"], number), line)
        assert {**line, "timestamp_ms": 0} == {**known, "timestamp_ms": 0}
    return list(first.values())


def outputs(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "output"]


def seqs(lines: list[dict[str, Any]]) -> list[int]:
    return [line["seq"] for line in lines if "seq" in line]
