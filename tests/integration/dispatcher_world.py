"""A daemon's inside without its processes: real registry, ingest and files; workers are the fake executor's."""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunRecord, RunState
from trn.core.settings import DeviceSetting, InventorySettings, Settings
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.dispatch.dispatcher import TrainerDispatcher
from trn.daemon.dispatch.readiness import FakeReadiness
from trn.daemon.ingest.ingest import Ingest
from trn.daemon.intake.submission import Submission, read_submission
from trn.daemon.machine.devices import Devices
from trn.daemon.machine.unknown_workers import UnknownWorkers
from trn.executors.base import AttemptKey
from trn.executors.fake import FakeExecutor
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

DEADLINE_S = 60.0


class WatchedDevices(Devices):
    """Devices on which others may be found."""

    def __init__(self, settings: InventorySettings, *, is_detected: bool = False) -> None:
        """`is_detected`: as if the machine had them, and not the settings."""
        super().__init__(settings)
        self.foreign: dict[str, list[int]] = {}
        found = self.inventory.devices
        devices = tuple(replace(device, is_declared=not is_detected) for device in found)
        self.inventory = replace(self.inventory, devices=devices)

    async def foreign_processes(self, device_id: str, own_pids: set[int]) -> list[int]:
        return self.foreign.get(device_id, [])


@dataclass
class WallClock:
    """Milliseconds that pass only when told."""

    ms: int = 1_000_000_000

    def __call__(self) -> int:
        return self.ms


@dataclass
class World:
    """What outlives a daemon."""

    home: Home
    executor: FakeExecutor = field(default_factory=FakeExecutor)
    others: dict[str, FakeExecutor] = field(default_factory=dict)  # of pools besides `local`
    num_gpus: int = 2
    is_detected: bool = False  # the GPUs: then the readiness is asked about them
    readiness: FakeReadiness = field(default_factory=FakeReadiness)
    cpus: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    clock: WallClock = field(default_factory=WallClock)
    free_bytes: int = 1 << 40
    slept_s: float = 0.0  # by the daemon, as its own clock shows it
    dispatcher: TrainerDispatcher | None = None
    ingest: Ingest | None = None
    secrets: SecretValues = field(default_factory=lambda: SecretValues({}))

    def __post_init__(self) -> None:
        self.home.make()
        gpus = [DeviceSetting(id=f"cuda:{index}") for index in range(self.num_gpus)]
        inventory = InventorySettings(devices=gpus, cpus=self.cpus, memory_mb=1000)
        given = {"sweep_s": 0.05, "kill_patience_s": 0.05, **self.settings}
        self.made_settings = Settings(inventory=inventory, **given)
        self.devices = WatchedDevices(inventory, is_detected=self.is_detected)
        self.registry = RunRegistry(self.home.registry, clock_ms=self.clock)
        self.registry.set_slots([gpu.id for gpu in gpus]).result()
        self.metrics = MetricStore(self.home.metrics)
        self.changed = asyncio.Event()
        self.on_commit: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return time.monotonic() + self.slept_s

    def close(self) -> None:
        self.registry.close()
        self.metrics.close()

    def submit(self, run_id: str, **config: Any) -> RunRecord:
        given = {"trainer": "a:B", "mock_batches": [1], "run_id": run_id, "grace_s": 0.1, "name": run_id}
        priority, interpreter = config.pop("priority", 0), config.pop("interpreter", "")
        secret_env = config.pop("secret_env", None)
        text = json.dumps({**given, **config}).encode()
        asked = Submission(
            config_json=text,
            priority=priority,
            interpreter=interpreter,
            secret_env=secret_env or {},
            submission_id=f"{run_id}-{secrets.token_hex(4)}",
        )
        pools = [LOCAL_POOL, *self.others]
        new = read_submission(asked, inventory=self.devices.inventory, pools=pools, max_config_bytes=1 << 20)
        new = msgspec.structs.replace(new, digest=f"sha256:{run_id}")  # no two of them are equal
        self.secrets.keep(new.submission_id, asked.secret_env)
        record, existed = self.registry.submit(new).result()
        assert not existed
        if self.dispatcher is not None:
            self.dispatcher.wake()
        return record

    def key(self, run_id: str, number: int) -> AttemptKey:
        return AttemptKey(run_id, number, self.registry.get(run_id).nonce)

    def cancel(self, run_id: str) -> None:
        self.registry.want_cancel(run_id, "asked by a test").result()
        if self.dispatcher is not None:
            self.dispatcher.cancel_wanted(run_id)

    @contextlib.asynccontextmanager
    async def daemon(self) -> AsyncIterator[TrainerDispatcher]:
        """One life of the daemon; leaving it is its end. Nothing that it handed in for writing is lost."""
        loop = asyncio.get_running_loop()
        broadcaster = RunEventBroadcaster(self.registry)

        def commit() -> None:
            broadcaster.run_changed()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.changed.set)
            self.on_commit()

        self.registry.writer.on_commit = commit
        ingest = self.ingest = Ingest(
            clock=self.monotonic,
            registry=self.registry,
            metrics=self.metrics,
            broadcaster=broadcaster,
            files=Pools({LOCAL_POOL: LocalFiles(self.home), **self.others}),
            home=self.home,
            sweep_s=0.05,
        )
        pools = self.pools = Pools({LOCAL_POOL: self.executor, **self.others})
        self.unknown = UnknownWorkers(registry=self.registry, pools=pools, home=self.home)
        await self.unknown.look()
        self.dispatcher = TrainerDispatcher(
            registry=self.registry,
            pools=pools,
            ingest=ingest,
            devices=self.devices,
            home=self.home,
            settings=self.made_settings,
            clock=self.monotonic,
            now_ms=self.clock,
            free_bytes=lambda: self.free_bytes,
            readiness=self.readiness,
            secrets=self.secrets,
            unknown=self.unknown,
        )
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(part.run()) for part in (ingest, broadcaster, self.dispatcher)]
            try:
                yield self.dispatcher
            finally:
                for part in parts:
                    part.cancel()
        self.dispatcher = None
        self.registry.writer.between(lambda: None).result()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for commits until that holds; what is not committed is looked at now and then."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self.changed.wait()

    async def until_state(self, run_id: str, *states: RunState) -> RunRecord:
        await self.until(lambda: self.registry.get(run_id).state in states)
        return self.registry.get(run_id)

    async def until_ended(self, *run_ids: str) -> list[RunRecord]:
        await self.until(lambda: all(self.registry.get(run_id).state.is_terminal for run_id in run_ids))
        return [self.registry.get(run_id) for run_id in run_ids]

    def check_nothing_is_held(self) -> None:
        """No slot, CPU or memory leaked, no run ran twice at once, nobody is left behind."""
        assert [slot for slot in self.registry.slots() if slot["run_id"] is not None] == []
        assert self.registry.held() == (0, 0)
        assert self.registry.live() == []
        for executor in (self.executor, *self.others.values()):
            assert executor.violations == []
            assert executor.live() == []


def in_world(tmp_path: Path, story: Callable[[World], Any], **fields: Any) -> None:
    """Run one story in a world of its own."""

    async def tell() -> None:
        world = World(Home(tmp_path), **fields)
        try:
            async with asyncio.timeout(4 * DEADLINE_S):
                await story(world)
        finally:
            world.close()

    asyncio.run(tell())
