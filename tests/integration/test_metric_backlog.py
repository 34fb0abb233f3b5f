"""Points of a run that has ended come to the charts, though the metric store could not take them when they came."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from trn.core.causes import Cause
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunState
from trn.daemon.api.broadcaster import RunEventBroadcaster
from trn.daemon.ingest.ingest import Ingest
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import Ending, NewRun
from trn.registry.metrics import MetricStore, Place, find_behind
from trn.registry.sqlite import RunRegistry

DEADLINE_S = 60
NUM_EVENTS = 5


class FullStore(MetricStore):
    """Has no room until `is_full` is taken back."""

    is_full = True

    def add(self, run_id: str, **values: Any) -> "Future[None]":
        if not self.is_full:
            return super().add(run_id, **values)
        refused: Future[None] = Future()
        refused.set_exception(UnavailableError("the disk is full"))
        return refused


@contextlib.asynccontextmanager
async def ingesting(
    home: Home, registry: RunRegistry, metrics: MetricStore, store_again_s: float = 0.02
) -> AsyncIterator[Ingest]:
    ingest = Ingest(
        registry=registry,
        metrics=metrics,
        broadcaster=RunEventBroadcaster(registry),
        files=Pools({LOCAL_POOL: LocalFiles(home)}),
        home=home,
        sweep_s=0.02,
        store_again_s=store_again_s,
    )
    task = asyncio.create_task(ingest.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield ingest
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


def start_run(home: Home, registry: RunRegistry, run_id: str) -> None:
    """A run that has written all its events."""
    registry.submit(NewRun(run_id=run_id, digest=run_id, config={})).result()
    registry.claim(run_id, []).result()
    path = home.run(run_id).events
    path.parent.mkdir(parents=True)
    head = {"schema_version": "trainer_event.v1", "event": "metric", "run_id": run_id, "attempt": 1}
    lines = [
        json.dumps({**head, "seq": seq, "timestamp_ms": seq, "name": "loss", "value": seq, "step": seq})
        for seq in range(1, NUM_EVENTS + 1)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def end_run(registry: RunRegistry, run_id: str) -> None:
    registry.end(run_id, 1, Ending(state=RunState.COMPLETED, cause=Cause(id="completed"))).result()


async def until(is_so: Callable[[], bool]) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(0.01)


def steps(metrics: MetricStore, run_id: str) -> list[int]:
    return [step for series in metrics.query(run_id) for step in series.steps]


def test_points_that_the_store_refused_while_their_run_ended_follow_when_it_takes_them(home: Home) -> None:
    async def main() -> None:
        with (
            contextlib.closing(RunRegistry(home.registry)) as registry,
            contextlib.closing(FullStore(home.metrics)) as metrics,
        ):
            start_run(home, registry, "r")
            async with ingesting(home, registry, metrics) as ingest:
                ingest.follow("r", 1)
                await ingest.unfollow("r")
                end_run(registry, "r")
                ended = registry.get("r")
                assert ended.last_seq == NUM_EVENTS
                assert steps(metrics, "r") == []
                metrics.is_full = False
                await until(lambda: steps(metrics, "r") == [1, 2, 3, 4, 5])
                assert registry.get("r") == ended

    asyncio.run(main())


def test_points_that_a_power_cut_took_are_read_again_at_the_next_start(home: Home) -> None:
    """Of a run whose files are there; one whose files were deleted stays as it is."""

    async def main() -> None:
        with (
            contextlib.closing(RunRegistry(home.registry)) as registry,
            contextlib.closing(MetricStore(home.metrics)) as metrics,
        ):
            for run_id in ("deleted", "lost", "whole"):
                start_run(home, registry, run_id)
                async with ingesting(home, registry, metrics) as ingest:
                    ingest.follow(run_id, 1)
                    await ingest.unfollow(run_id)
                end_run(registry, run_id)
            for run_id in ("deleted", "lost"):
                metrics.rewind(run_id, Place()).result()
            home.run("deleted").events.unlink()
            before = registry.page()
            assert sorted(find_behind(home.registry, home.metrics)) == ["deleted", "lost"]
            async with ingesting(home, registry, metrics):
                await until(lambda: find_behind(home.registry, home.metrics) == ["deleted"])
            assert steps(metrics, "lost") == [1, 2, 3, 4, 5]
            assert registry.page() == before

    asyncio.run(main())
