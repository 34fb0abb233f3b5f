"""A home with real stores, and an ingest of it, for tests that write events files by hand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trn.core.causes import failure
from trn.core.digest import run_digest
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunState
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.ingest.ingest import Ingest
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore
from trn.registry.sqlite import RunRegistry

DEADLINE_S = 60


class Stores:
    """A home with real stores that can be made to fail, and closed and opened again."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root / "home")
        self.home.make()
        self.published: dict[str, list[int]] = {}
        self.open()

    def open(self) -> None:
        self.registry = RunRegistry(self.home.registry)
        self.metrics = MetricStore(self.home.metrics)

    def close(self) -> None:
        self.registry.close()
        self.metrics.close()

    def start_run(self, run_id: str) -> None:
        config = {"trainer": "a:B", "seed": run_id}
        self.registry.submit(
            NewRun(run_id=run_id, digest=run_digest(config), config=config, max_attempts=9)
        ).result()
        self.start_attempt(run_id)

    def start_attempt(self, run_id: str) -> int:
        number = self.registry.claim(run_id, []).result().number
        self.registry.launched(run_id, number, worker="b/1/1", pid=1).result()
        return number

    def end_attempt(self, run_id: str, number: int) -> None:
        self.registry.end(run_id, number, Ending(state=RunState.PENDING, cause=failure("killed"))).result()

    def path(self, run_id: str) -> Path:
        path = self.home.run(run_id).events
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.asynccontextmanager
    async def ingesting(self, sweep_s: float = 0.02) -> AsyncIterator[Ingest]:
        """A new ingest, as after a restart; what it publishes is noted."""
        broadcaster = RunEventBroadcaster(self.registry)
        notes = self.published

        class Noting(RunEventBroadcaster):
            def is_watched(self, run_id: str) -> bool:
                return True

            def publish_events(self, run_id: str, batch: Any) -> None:
                notes.setdefault(run_id, []).extend(
                    json.loads(line)["seq"] for line in batch.lines.split(b"\n")[:-1]
                )

        broadcaster = Noting(self.registry)
        ingest = Ingest(
            registry=self.registry,
            metrics=self.metrics,
            broadcaster=broadcaster,
            files=Pools({LOCAL_POOL: LocalFiles(self.home)}),
            home=self.home,
            sweep_s=sweep_s,
        )
        task = asyncio.create_task(ingest.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield ingest
        finally:
            task.cancel()
            await asyncio.wait([task])


def line(seq: int, event: str = "log", attempt: int = 1, **fields: Any) -> bytes:
    head = {"schema_version": "trainer_event.v1", "event": event, "seq": seq, "run_id": "r"}
    return json.dumps({**head, "attempt": attempt, "timestamp_ms": 1000 + seq, **fields}).encode() + b"\n"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)
