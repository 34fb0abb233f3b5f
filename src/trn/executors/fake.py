"""An executor without processes: scripted workers that write real events files. Ships beside the interface it fakes.

It outlives any number of dispatchers, as the launcher and its workers do, and keeps the promise of the record file:
at most one process ever stands for an attempt. `violations` says where someone made it start two of a run at once, or
two on one device.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trn.core.causes import Cause
from trn.core.errors import UnavailableError
from trn.executors.base import (
    NO_SECRETS,
    AttemptKey,
    AttemptStart,
    FoundWorker,
    ImportCheck,
    LaunchPlan,
    Worker,
    WorkerExit,
)
from trn.executors.local.files import LocalFile

WELL = WorkerExit(exit_code=0)
UNKNOWN = WorkerExit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a worker does: it begins, lasts or not, writes its last event, ends."""

    event: str = "completed"  # "failed", or "" for none
    category: str = ""
    error: str = ""
    step: int = 1
    exit: WorkerExit = WELL
    lasts: bool = False  # until it is stopped, or `finish` is called
    is_silent: bool = False  # not even `started`
    is_deaf: bool = False  # to SIGTERM
    num_end_faults: int = 0  # so often it cannot be ended


@dataclass(slots=True)
class FakeProcess:
    """One worker."""

    plan: LaunchPlan
    script: Script
    worker: Worker
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    exit: WorkerExit = UNKNOWN
    num_stops: int = 0
    num_notices: int = 0
    num_ends: int = 0


async def _go_on(_point: str, _key: AttemptKey) -> None:
    """The default of `at`: nothing happens."""


@dataclass(slots=True)
class FakeExecutor:
    """Answers like an executor. `behave` scripts each launch; `at(point, key)` runs at each point and may raise or hang."""

    behave: Callable[[LaunchPlan], Script] = lambda _plan: Script()
    at: Callable[[str, AttemptKey], Awaitable[None]] = _go_on
    try_: Callable[[LaunchPlan, dict[str, Any]], ImportCheck] = lambda _plan, _config: ImportCheck()
    processes: dict[AttemptKey, FakeProcess] = field(default_factory=dict)
    abandoned: set[AttemptKey] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    secrets: dict[AttemptKey, dict[str, str]] = field(default_factory=dict)

    async def start(self) -> None:
        """There is nothing to start."""

    async def aclose(self) -> None:
        """Its workers go on."""

    def state(self) -> str:
        return f"{len(self.live())} scripted workers"

    def worker_environ(self) -> Mapping[str, str]:
        return self.environ

    async def launch(self, plan: LaunchPlan, secret_env: Mapping[str, str] = NO_SECRETS) -> Worker:
        self.secrets[plan.key] = dict(secret_env)
        await self.at("launch.asked", plan.key)
        if plan.key in self.abandoned:
            raise UnavailableError(f"{plan.key} was given up")
        if plan.key not in self.processes:
            self._fork(plan)
        await self.at("launch.done", plan.key)
        return self.processes[plan.key].worker

    async def check_imports(
        self,
        plan: LaunchPlan,
        config: dict[str, Any],
        secret_env: Mapping[str, str] = NO_SECRETS,  # noqa: ARG002
    ) -> ImportCheck:
        await self.at("check_imports", plan.key)
        return self.try_(plan, config)

    async def find(self, key: AttemptKey) -> Worker | None:
        await self.at("find.asked", key)
        if key not in self.processes:
            self.abandoned.add(key)
        await self.at("find.done", key)
        return self.processes[key].worker if key in self.processes else None

    async def find_workers(self) -> list[FoundWorker]:
        return [
            FoundWorker(
                run_id=process.plan.run_id,
                worker=process.worker,
                number=process.plan.number,
                nonce=process.plan.nonce,
                devices=process.plan.devices,
                cpus=process.plan.cpus,
                memory_mb=process.plan.memory_mb,
            )
            for process in self.live()
        ]

    async def wait(self, key: AttemptKey, worker: Worker) -> WorkerExit:
        process = self._of(worker)
        await self.at("wait.asked", key)
        await process.ended.wait()
        await self.at("wait.done", key)
        return process.exit

    async def stop(self, worker: Worker) -> bool:
        process = self._of(worker)
        await self.at("stop", process.plan.key)
        if process.ended.is_set():
            return False
        process.num_stops += 1
        if not process.script.is_deaf:
            cancelled = {"event": "failed", "category": "cancelled", "error": "cancelled by SIGTERM"}
            self._write(process, **cancelled, step=process.script.step)
            self._end(process, WorkerExit(exit_code=75))
        return True

    async def notify(self, worker: Worker) -> bool:
        process = self._of(worker)
        await self.at("notify", process.plan.key)
        process.num_notices += not process.ended.is_set()
        return not process.ended.is_set()

    async def end(self, worker: Worker) -> None:
        process = self._of(worker)
        await self.at("end.asked", process.plan.key)
        process.num_ends += 1
        if process.num_ends <= process.script.num_end_faults:
            raise UnavailableError(f"{worker} cannot be ended")
        self._end(process, WorkerExit(exit_code=-signal.SIGKILL))
        await self.at("end.done", process.plan.key)

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: Cause) -> bool:
        await self.at("close.asked", plan.key)
        process = self.processes[plan.key]
        events = read_events(_events_path(plan))
        if not any(
            item["attempt"] == plan.number and item["event"] in ("completed", "failed") for item in events
        ):
            self._write(
                process,
                event="failed",
                category=category,
                error=error,
                step=process.script.step,
                cause=cause.id,
                values=dict(cause.values),
                closed_by="daemon",
            )
        await self.at("close.done", plan.key)
        return True

    def events(self, run_id: str) -> LocalFile:
        paths = (
            process.plan.events_path for process in self.processes.values() if process.plan.run_id == run_id
        )
        return LocalFile(Path(next(paths, "/nonexistent")))

    def log(self, run_id: str) -> LocalFile:
        paths = (
            process.plan.log_path for process in self.processes.values() if process.plan.run_id == run_id
        )
        return LocalFile(Path(next(paths, "/nonexistent")))

    def log_starts(self, run_id: str, offset: int) -> list[AttemptStart]:  # noqa: ARG002
        return []  # they print nothing

    def finish(self, run_id: str, script: Script | None = None) -> None:
        """Let the run's lasting worker end now, as its script says, or as this one does."""
        process = next(item for item in self.live() if item.plan.run_id == run_id)
        self._finish(process, script or process.script)

    def live(self) -> list[FakeProcess]:
        return [process for process in self.processes.values() if not process.ended.is_set()]

    def _of(self, worker: Worker) -> FakeProcess:
        return next(item for item in self.processes.values() if item.worker == worker)

    def _fork(self, plan: LaunchPlan) -> None:
        for other in self.live():
            if other.plan.run_id == plan.run_id:
                self.violations.append(f"{plan.key} was started while {other.plan.key} ran")
            if _devices(plan) & _devices(other.plan):
                self.violations.append(f"{plan.key} was started on a device of {other.plan.key}")
        pid = 1000 + len(self.processes)
        process = FakeProcess(plan, self.behave(plan), Worker(ref=f"fake-{pid}", pid=pid))
        self.processes[plan.key] = process
        if not process.script.is_silent:
            self._write(process, event="started")
        if not process.script.lasts:
            self._finish(process, process.script)

    def _finish(self, process: FakeProcess, script: Script) -> None:
        if script.event == "completed":
            self._write(process, event="completed", step=script.step, final_checkpoint=None)
        elif script.event:
            told = {"category": script.category, "error": script.error}
            self._write(process, event=script.event, step=script.step, **told)
        self._end(process, script.exit)

    def _end(self, process: FakeProcess, worker_exit: WorkerExit) -> None:
        if not process.ended.is_set():
            process.exit = worker_exit
            process.ended.set()

    def _write(self, process: FakeProcess, **fields: Any) -> None:
        path = _events_path(process.plan)
        path.parent.mkdir(parents=True, exist_ok=True)
        line = {
            "schema_version": "trainer_event.v1",
            "event": fields.pop("event"),
            "seq": len(read_events(path)) + 1,
            "run_id": process.plan.run_id,
            "attempt": process.plan.number,
            "timestamp_ms": time.time_ns() // 1_000_000,
            **({"nonce": process.plan.nonce} if process.plan.nonce else {}),
        }
        with path.open("ab") as file:
            file.write(msgspec.json.encode({**line, **fields}) + b"\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events of a file; none where there is none."""
    with contextlib.suppress(FileNotFoundError):
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    return []


def _events_path(plan: LaunchPlan) -> Path:
    return Path(plan.events_path)


def _devices(plan: LaunchPlan) -> set[str]:
    return set(filter(None, plan.env.get("CUDA_VISIBLE_DEVICES", "").split(",")))
