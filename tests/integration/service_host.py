"""The daemon's service over the real registry, ingest and broadcaster, in the test's own loop; no worker runs.

`Host` is one life of a daemon: leave the context and enter another one on the same home, and it was restarted.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
import msgspec

from trn.core.causes import QUEUED, Cause
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunRecord, RunState
from trn.core.settings import DeviceSetting, InventorySettings, ListenSettings, Settings
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.api.run_streams import RunStreams
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.api.server import add_ports, build_server
from trn.daemon.api.service import TrainerService
from trn.daemon.dispatch.worker_plan import WorkerFiles, build_plan
from trn.daemon.ingest.ingest import Ingest
from trn.daemon.intake.import_checks import ImportChecks
from trn.daemon.intake.intake import Intake
from trn.daemon.intake.resumption import Resumption
from trn.daemon.intake.run_judge import RunJudge
from trn.daemon.machine.devices import Devices
from trn.daemon.serving.inference_job import InferenceJobs
from trn.daemon.serving.model_choice import ModelChoice
from trn.daemon.serving.promotions import Promotions
from trn.daemon.serving.successors import Successors
from trn.daemon.upkeep.removal import Removal
from trn.daemon.upkeep.singleton import DaemonInfo
from trn.executors.fake import FakeExecutor
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

INVENTORY = InventorySettings(
    devices=[DeviceSetting(id="cuda:0", memory_mb=1000), DeviceSetting(id="cuda:1", memory_mb=1000)],
    cpus=8,
    memory_mb=16_000,
)
LOOPBACK = ListenSettings(address="127.0.0.1:0", is_insecure=True)


def job(**changes: Any) -> dict[str, Any]:
    """A job that no worker will ever run."""
    return {"trainer": "nowhere:Trainer", "max_steps": 10, "mock_batches": [[1]], **changes}


class Dispatcher:
    """Stands in for the one that starts workers: remembers what it was told."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.num_wakes = 0
        self.cancels: list[str] = []
        self.environ: dict[str, str] = {}

    def submitted(self) -> None:
        self.num_wakes += 1

    def cancel_wanted(self, run_id: str) -> None:
        self.cancels.append(run_id)

    def worker_environ(self, _pool: str) -> Mapping[str, str]:
        return self.environ

    def plan(self, new: NewRun) -> WorkerFiles:
        run = RunRecord(
            run_id=new.run_id,
            digest=new.digest,
            state=RunState.PENDING,
            cause=QUEUED,
            config=new.config,
            submitted_ms=1,
            updated_ms=1,
            needs=new.needs,
            kind=new.kind,
            secret_env=new.secret_env,
        )
        return build_plan(
            run,
            1,
            self.home.run(new.run_id),
            device_ids=(),
            devices_env={},
            doorbell="",
            python="python",
            launcher_python="python",
        )


class Launcher:
    """There is none; it only says so."""

    def state(self) -> str:
        return "no launcher in this test"


class Host:
    """One life of the daemon's service."""

    def __init__(
        self,
        root: Path,
        *,
        listen: ListenSettings | None = None,
        settings: Mapping[str, Any] | None = None,
        ring: Mapping[str, int] | None = None,
    ) -> None:
        self.home = Home(root)
        self.settings = Settings(
            **{"inventory": INVENTORY, "listen": listen or ListenSettings(), **dict(settings or {})}
        )
        self._ring = dict(ring or {})
        self._stack = contextlib.AsyncExitStack()
        self.dispatcher = Dispatcher(self.home)
        self.executor = FakeExecutor()
        self.addresses: list[str] = []
        self.secrets = SecretValues({})

    async def __aenter__(self) -> Self:
        stack, home = self._stack, self.home
        home.make()
        self.registry = RunRegistry(home.registry)
        stack.callback(self.registry.close)
        self.metrics = MetricStore(home.metrics)
        stack.callback(self.metrics.close)
        self.broadcaster = RunEventBroadcaster(self.registry, **self._ring)
        self.registry.writer.on_commit = self.broadcaster.run_changed
        self.ingest = Ingest(
            registry=self.registry,
            metrics=self.metrics,
            broadcaster=self.broadcaster,
            files=Pools({LOCAL_POOL: LocalFiles(home)}),
            home=home,
        )
        devices = Devices(self.settings.inventory)
        await self.commit(self.registry.set_slots(["cuda:0", "cuda:1"]))
        pools = Pools({LOCAL_POOL: self.executor})
        choice = ModelChoice(registry=self.registry, home=home)
        self.promotions = Promotions(registry=self.registry, choice=choice, pools=pools, home=home)
        self.ingest.on_server_event = lambda _run_id: self.promotions.look()
        intake = Intake(
            registry=self.registry,
            judge=RunJudge(
                registry=self.registry,
                dispatcher=self.dispatcher,
                imports=ImportChecks(Pools({LOCAL_POOL: self.executor}), home),
                devices=devices,
                home=home,
                settings=self.settings,
            ),
            resumption=Resumption(
                self.registry, home, secrets=self.secrets, max_config_bytes=self.settings.max_config_bytes
            ),
            inference=InferenceJobs(
                ModelChoice(registry=self.registry, home=home),
                max_config_bytes=self.settings.max_config_bytes,
            ),
            dispatcher=self.dispatcher,
            secrets=self.secrets,
            home=home,
        )
        self.successors = Successors(
            registry=self.registry, choice=choice, promotions=self.promotions, intake=intake, home=home
        )
        self.service = TrainerService(
            registry=self.registry,
            metrics=self.metrics,
            intake=intake,
            promotions=self.promotions,
            streams=RunStreams(
                registry=self.registry,
                broadcaster=self.broadcaster,
                files=Pools({LOCAL_POOL: LocalFiles(home)}),
                home=home,
            ),
            dispatcher=self.dispatcher,
            launcher=Launcher(),
            removal=Removal(
                registry=self.registry, metrics=self.metrics, home=home, cache_dir=home.root / "cache"
            ),
            devices=devices,
            home=home,
            info=DaemonInfo(pid=1, version="0", addresses=(), started_ms=1),
        )
        tasks = [asyncio.create_task(part.run()) for part in (self.broadcaster, self.ingest, self.promotions)]
        stack.push_async_callback(_end, tasks)
        self.server = await self.build_server()
        self.addresses = add_ports(self.server, self.settings, home)
        await self.server.start()
        stack.push_async_callback(self.server.stop, 0.2)
        stack.callback(self.service.streams.end_all)
        return self

    async def build_server(self) -> grpc.aio.Server:
        return await build_server(self.service)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def tcp(self) -> str:
        return self.addresses[1]

    async def commit(self, future: Any) -> Any:
        return await asyncio.wrap_future(future)

    async def add_run(self, run_id: str, **config: Any) -> RunRecord:
        new = NewRun(
            run_id=run_id, digest=f"sha256:{run_id}", config=job(run_id=run_id, **config), name=run_id
        )
        record, existed = await self.commit(self.registry.submit(new))
        assert not existed
        return record

    async def start(self, run_id: str) -> None:
        """The run's next attempt runs, in a process that is none."""
        attempt = await self.commit(self.registry.claim(run_id, []))
        await self.commit(self.registry.launched(run_id, attempt.number, worker=f"{run_id}/4/1", pid=4))
        self.home.run(run_id).events.parent.mkdir(parents=True, exist_ok=True)
        self.ingest.follow(run_id, attempt.number)

    def write_events(self, run_id: str, first: int, last: int, *, pad: int = 0) -> None:
        """As a worker would: events with these numbers, and a ring."""
        with self.home.run(run_id).events.open("ab") as file:
            nonce = self.registry.get(run_id).nonce
            lines = [event_line(run_id, seq, pad=pad, nonce=nonce) for seq in range(first, last + 1)]
            file.write(b"".join(lines))
        self.ingest.ring(run_id)

    async def end(
        self, run_id: str, state: RunState = RunState.COMPLETED, *, is_saved: bool = True
    ) -> RunRecord:
        """`is_saved`: a completed run leaves the marker of its final checkpoint, which nobody can read."""
        await self.ingest.drain(run_id)
        if is_saved and state is RunState.COMPLETED:
            final = self.home.run(run_id).checkpoints / "final.meta.json"
            final.parent.mkdir(parents=True, exist_ok=True)
            final.touch()
        attempt = self.registry.get(run_id).attempt
        record = await self.commit(
            self.registry.end(run_id, attempt, Ending(state=state, cause=Cause(id="completed")))
        )
        await self.ingest.unfollow(run_id)
        return record


def event_line(run_id: str, seq: int, *, pad: int = 0, nonce: str = "") -> bytes:
    event: dict[str, Any] = {
        "schema_version": "trainer_event.v1",
        "event": "metric",
        "seq": seq,
        "run_id": run_id,
        "attempt": 1,
        "timestamp_ms": time.time_ns() // 1_000_000,
        "name": "train/loss",
        "value": 1.0 / seq,
        "step": seq,
    }
    if nonce:
        event["nonce"] = nonce
    if pad:
        event["note"] = "x" * pad
    return msgspec.json.encode(event) + b"\n"


async def until(is_so: Callable[[], bool]) -> None:
    """Looks until it is so; there is nothing to be woken by."""
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
