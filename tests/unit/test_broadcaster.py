"""Live streams: everyone gets everything in order, or is told what they missed; nobody waits for a slow one."""

import asyncio
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from trn.core.causes import failure
from trn.core.digest import run_digest
from trn.core.runs import RunState
from trn.daemon.api.broadcaster import EventWatch, FellBehind, RunEventBroadcaster
from trn.daemon.ingest.event_file import EventBatch
from trn.registry.base import Ending, NewRun
from trn.registry.sqlite import RunRegistry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RunRegistry]:
    registry = RunRegistry(tmp_path / "registry.db")
    yield registry
    registry.close()


def submit(registry: RunRegistry, run_id: str) -> None:
    config = {"trainer": "a:B", "seed": run_id}
    registry.submit(NewRun(run_id=run_id, digest=run_digest(config), config=config)).result()


def batch(first: int, last: int | None = None, size: int = 10) -> EventBatch:
    return EventBatch(first_seq=first, last_seq=last or first, lines=b"x" * size)


async def collect(watch: EventWatch, until: int) -> list[int]:
    """First numbers of batches as they come; a replay is written as the numbers it would read."""
    seen: list[int] = []
    while not seen or seen[-1] < until:
        news = await watch.next()
        if isinstance(news, FellBehind):
            seen += range(news.missed_from, news.missed_to + 1)
        else:
            seen += [item.first for item in news]
    return seen


def test_a_watcher_gets_everything_after_it_came_at_once_and_in_order(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry)
        broadcaster.publish_events("r", batch(1))
        assert not broadcaster.is_watched("r")
        with broadcaster.watch_events("r", "me") as watch:
            for seq in range(2, 12):
                broadcaster.publish_events("r", batch(seq))
                broadcaster.publish_events("other", batch(seq))
            news = await watch.next()
            assert isinstance(news, list)
            assert [item.first for item in news] == list(range(2, 12))
            waiting = asyncio.create_task(watch.next())
            await asyncio.sleep(0)
            assert not waiting.done()
            broadcaster.publish_events("r", batch(12, 14))
            (item,) = await waiting
            assert item.item == batch(12, 14)
            assert broadcaster.num_watchers == 1
        assert (broadcaster.num_watchers, broadcaster.is_watched("r")) == (0, False)

    asyncio.run(main())


def test_one_serialisation_is_shared_by_all_watchers(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry)
        watches = [broadcaster.watch_events("r", str(number)) for number in range(3)]
        broadcaster.publish_events("r", batch(1))
        (first,) = await watches[0].next()
        first.encoded = b"encoded"
        for watch in watches[1:]:
            (item,) = await watch.next()
            assert item.encoded == b"encoded"

    asyncio.run(main())


@pytest.mark.parametrize("limits", [{"max_items": 4}, {"max_bytes": 45}])
def test_a_slow_watcher_is_told_what_it_missed_and_the_others_miss_nothing(
    registry: RunRegistry, caplog: pytest.LogCaptureFixture, limits: dict[str, int]
) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry, **limits)
        slow = broadcaster.watch_events("r", "slow one")
        quick = broadcaster.watch_events("r", "quick one")
        got: list[int] = []
        for seq in range(11, 31):
            broadcaster.publish_events("r", batch(seq))
            news = await quick.next()
            assert isinstance(news, list)
            got += [item.first for item in news]
        assert got == list(range(11, 31))
        warnings = [record.getMessage() for record in caplog.records]
        assert [("slow one" in text, "it has 10 and the newest is" in text) for text in warnings] == [
            (True, True)
        ]
        assert await slow.next() == FellBehind(missed_from=11, missed_to=30)
        broadcaster.publish_events("r", batch(31))
        (item,) = await slow.next()
        assert item.first == 31

    with caplog.at_level(logging.WARNING, "trn.broadcaster"):
        asyncio.run(main())


def test_whoever_is_slow_and_however_they_pause_all_numbers_arrive_once_and_in_order(
    registry: RunRegistry,
) -> None:
    async def pausing(watch: EventWatch, rng: random.Random, until: int) -> list[int]:
        seen: list[int] = []
        while not seen or seen[-1] < until:
            for _ in range(rng.choice([0, 0, 1, 5, 40])):
                await asyncio.sleep(0)
            news = await watch.next()
            if isinstance(news, FellBehind):
                seen += range(news.missed_from, news.missed_to + 1)
            else:
                seen += [seq for item in news for seq in range(item.first, item.last + 1)]
        return seen

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        broadcaster = RunEventBroadcaster(registry, max_items=8)
        watches = [broadcaster.watch_events("r", str(number)) for number in range(5)]
        async with asyncio.TaskGroup() as tasks:
            seeing = [
                tasks.create_task(pausing(watch, random.Random(seed + number), 400))
                for number, watch in enumerate(watches)
            ]
            seq = 1
            while seq <= 400:
                last = min(400, seq + rng.randrange(4))
                broadcaster.publish_events("r", batch(seq, last))
                seq = last + 1
                if rng.random() < 0.4:
                    await asyncio.sleep(0)
        for task in seeing:
            assert task.result() == list(range(1, 401))

    for seed in range(10):
        asyncio.run(main(seed))


def test_two_thousand_watchers_get_all_of_it(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry)
        idle = [broadcaster.watch_events(f"idle-{number}", "idle") for number in range(1000)]
        watches = [broadcaster.watch_events("r", str(number)) for number in range(2000)]
        assert broadcaster.num_watchers == 3000
        async with asyncio.TaskGroup() as tasks:
            seeing = [tasks.create_task(collect(watch, 30)) for watch in watches]
            for seq in range(1, 31):
                broadcaster.publish_events("r", batch(seq))
                await asyncio.sleep(0)
        assert all(task.result() == list(range(1, 31)) for task in seeing)
        for watch in (*idle, *watches):
            watch.close()
        assert broadcaster.num_watchers == 0

    asyncio.run(main())


def test_a_watcher_that_is_cancelled_takes_no_other_with_it(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry)
        with broadcaster.watch_events("r", "a") as one, broadcaster.watch_events("r", "b") as other:
            first, second = asyncio.create_task(one.next()), asyncio.create_task(other.next())
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            broadcaster.publish_events("r", batch(1))
            assert len(await second) == 1
            assert first.cancelled()

    asyncio.run(main())


def test_changes_of_runs_reach_all_watchers_with_one_read(registry: RunRegistry) -> None:
    async def main() -> None:
        num_reads = 0

        class Counting:
            last_change = staticmethod(registry.last_change)

            @staticmethod
            def changed(after: int, limit: int) -> object:
                nonlocal num_reads
                num_reads += 1
                return registry.changed(after, limit)

        submit(registry, "before")
        broadcaster = RunEventBroadcaster(Counting())  # type: ignore[arg-type]
        registry.writer.on_commit = broadcaster.run_changed
        pump = asyncio.create_task(broadcaster.run())
        await asyncio.sleep(0)
        submit(registry, "unseen")
        await asyncio.sleep(0)
        watches = [broadcaster.watch_runs(str(number)) for number in range(50)]
        num_reads = 0
        await asyncio.to_thread(submit, registry, "one")
        for watch in watches:
            news = await watch.next()
            assert isinstance(news, list)
            assert [item.item.run_id for item in news] == ["one"]
            assert news[0].item.state is RunState.PENDING
        assert num_reads <= 3
        registry.writer.on_commit = None
        pump.cancel()

    asyncio.run(main())


def test_a_burst_of_more_changes_than_a_page_arrives_whole(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry, max_items=5000)
        registry.writer.on_commit = broadcaster.run_changed
        with broadcaster.watch_runs("me") as watch:
            pump = asyncio.create_task(broadcaster.run())
            wanted = {f"run-{number}" for number in range(1100)}
            for run_id in sorted(wanted):
                config = {"trainer": "a:B", "seed": run_id}
                registry.submit(NewRun(run_id=run_id, digest=run_digest(config), config=config))
            seen: set[str] = set()
            changes: list[int] = []
            while seen != wanted:
                news = await watch.next()
                assert isinstance(news, list)
                seen |= {item.item.run_id for item in news}
                changes += [item.first for item in news]
            assert changes == sorted(changes)
            registry.writer.on_commit = None
            pump.cancel()

    asyncio.run(main())


def test_a_stream_of_events_ends_with_its_run_and_not_before(registry: RunRegistry) -> None:
    async def main() -> None:
        broadcaster = RunEventBroadcaster(registry)
        registry.writer.on_commit = broadcaster.run_changed
        submit(registry, "r")
        pump = asyncio.create_task(broadcaster.run())
        with broadcaster.watch_events("r", "me") as watch:
            registry.claim("r", []).result()
            broadcaster.publish_events("r", batch(1))
            assert len(await watch.next()) == 1  # type: ignore[arg-type]
            broadcaster.publish_events("r", batch(2))
            registry.end("r", 1, Ending(state=RunState.FAILED, cause=failure("killed"))).result()
            assert len(await watch.next()) == 1  # type: ignore[arg-type]
            assert await watch.next() == []
        registry.writer.on_commit = None
        pump.cancel()

    asyncio.run(main())


def test_a_commit_after_the_loop_is_closed_is_told_to_nobody(registry: RunRegistry) -> None:
    broadcaster = RunEventBroadcaster(registry)
    broadcaster.run_changed()

    async def main() -> None:
        pump = asyncio.create_task(broadcaster.run())
        broadcaster.watch_runs("somebody who never left")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pump.cancel()

    asyncio.run(main())
    broadcaster.run_changed()
    broadcaster.run_changed()
    assert broadcaster.num_watchers == 1  # so it was told, had there been a loop
