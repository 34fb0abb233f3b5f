"""Ingest: every event into the registry, the metric store and the streams exactly once, whatever fails and whenever."""

import asyncio
import contextlib
import json
import logging
import math
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ingest_stores import DEADLINE_S, Stores, append, line

from gen_worker.trainer.events.event_log import EventLog
from gen_worker.trainer.reporting import TrainingReporter
from trn.core.errors import UnavailableError
from trn.core.runs import LOCAL_POOL
from trn.daemon.api.broadcaster import FellBehind, RunEventBroadcaster
from trn.daemon.ingest.event_file import replay
from trn.daemon.ingest.ingest import Ingest
from trn.executors.local.files import LocalFile, LocalFiles
from trn.executors.pools import Pools


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path)
    yield stores
    stores.close()


def metric(seq: int, attempt: int = 1, step: int | None = None) -> bytes:
    return line(seq, "metric", attempt, name="loss", value=seq / 2, step=seq if step is None else step)


def test_a_workers_events_are_in_the_registry_and_the_metric_store(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        reporter = TrainingReporter(stores.path("r"), run_id="r")
        reporter.started(max_steps=500, epochs=None)
        reporter.log("training", step=0, end_step=100)
        reporter.metrics(7, {"train/loss": 0.5, "train/lr": 0.1, "bad": float("nan")})
        reporter.validation(8, {"val/loss": 0.25}, rows=3)
        reporter.heartbeat(9)
        reporter.flush()
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            run = stores.registry.get("r")
            assert (run.step, run.end_step, run.last_seq) == (9, 100, 5)
            assert run.event_offset == stores.path("r").stat().st_size
            assert math.isnan(run.metrics.pop("bad"))  # also where it is no number: the newest is the newest
            assert run.metrics == {"train/loss": 0.5, "train/lr": 0.1, "val/loss": 0.25}
            assert stores.registry.attempts("r")[0].last_heartbeat_ms > 0
            assert [series.name for series in stores.metrics.query("r")] == [
                "bad",
                "train/loss",
                "train/lr",
                "val/loss",
            ]
            assert await ingest.terminal("r", 1) is None
            reporter.completed(10, "final.pt")
            found = await ingest.terminal("r", 1)
            assert found is not None
            assert (found.event, found.step, found.final_checkpoint) == ("completed", 10, "final.pt")
            await ingest.unfollow("r")
            assert stores.registry.get("r").step == 10
            assert stores.published["r"] == [1, 2, 3, 4, 5, 6]
        reporter.close()

    asyncio.run(main())


def test_a_checkpoint_that_becomes_durable_later_does_not_take_the_step_back(stores: Stores) -> None:
    """Else a run that is killed then is said to have been killed at the step of its last checkpoint."""

    async def main() -> None:
        stores.start_run("r")
        append(stores.path("r"), metric(1, step=20) + line(2, "checkpoint", step=10, path="step-10.pt"))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            assert stores.registry.get("r").step == stores.registry.attempts("r")[0].step == 20
            append(stores.path("r"), line(3, "checkpoint", step=30, path="step-30.pt"))
            await ingest.drain("r")
            assert stores.registry.get("r").step == 30, "where nothing else tells it, a checkpoint does"
            append(stores.path("r"), line(4, "log", 2, message="resumed at step 10", step=10))
            await ingest.drain("r")
            assert stores.registry.get("r").step == 10

    asyncio.run(main())


def test_half_a_line_waits_and_a_lost_ring_costs_only_the_sweep(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        path = stores.path("r")
        append(path, metric(1) + metric(2)[:-9])
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            assert stores.registry.get("r").last_seq == 1
            append(path, metric(2)[-9:])
            while stores.registry.get("r").last_seq < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ingest.ring("nobody")

    asyncio.run(main())


def test_a_ring_is_answered_without_a_sweep_and_growth_is_noted(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        async with stores.ingesting(sweep_s=3600) as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            before = ingest.last_growth("r")
            append(stores.path("r"), metric(1))
            ingest.ring("r")
            while stores.registry.get("r").last_seq < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert ingest.last_growth("r") > before

    asyncio.run(main())


def test_damaged_lines_are_put_aside_told_once_and_stop_nothing(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stores.start_run("r")
        path = stores.path("r")
        append(path, metric(1) + b"\x00garbage\n" + metric(2) + b'{"seq":3}\n' + metric(4) + metric(2))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            append(path, b"x\n" * 10 + metric(5))
            await ingest.drain("r")
            await ingest.unfollow("r")
        assert stores.published["r"] == [1, 2, 4, 5]
        assert stores.metrics.query("r")[0].steps == [1, 2, 4, 5]
        kept = stores.home.run("r").damaged_events.read_text().splitlines()
        assert [json.loads(record)["offset"] for record in kept][:2] == [
            len(metric(1)),
            len(metric(1) * 2) + 9,
        ]
        assert len(kept) == 13

    with caplog.at_level(logging.WARNING, "trn.ingest"):
        asyncio.run(main())
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "copied to events.damaged.jsonl" in text]) == 1
    assert len([text for text in texts if "13 damaged lines in total" in text]) == 1
    assert len([text for text in texts if "1 events are missing after number" in text]) == 1


def test_what_the_next_attempt_cuts_off_is_not_missed_and_what_it_writes_is_taken(stores: Stores) -> None:
    async def main(is_seen_between: bool, is_restarted: bool, damage: bytes) -> None:
        run_id = f"r-{is_seen_between}-{is_restarted}-{len(damage)}"
        stores.start_run(run_id)
        path = stores.path(run_id)
        reporter = TrainingReporter(path, run_id=run_id)
        for step in range(1, 300):
            reporter.metric("loss", step, step)
        reporter.close()
        append(path, damage)
        async with contextlib.AsyncExitStack() as stack:
            ingest = await stack.enter_async_context(stores.ingesting())
            ingest.follow(run_id, 1)
            await ingest.drain(run_id)
            stores.end_attempt(run_id, 1)
            if is_restarted:
                await stack.aclose()
                ingest = await stack.enter_async_context(stores.ingesting())
            stores.start_attempt(run_id)
            second = TrainingReporter(path, run_id=run_id)
            if is_seen_between:
                ingest.follow(run_id, 2)
                await ingest.drain(run_id)
            for step in range(200, 400):
                second.metric("loss", -step, step)
            second.completed(400)
            second.close()
            ingest.follow(run_id, 2)
            await ingest.drain(run_id)
            last_seq = int(json.loads(path.read_bytes().split(b"\n")[-2])["seq"])
            assert stores.published[run_id] == list(range(1, last_seq + 1))
            run = stores.registry.get(run_id)
            assert (run.last_seq, run.event_offset, run.step) == (last_seq, path.stat().st_size, 400)
            (loss,) = stores.metrics.query(run_id)
            assert loss.values == [*range(1, 200), *range(-200, -400, -1)]

    for is_seen_between in (False, True):
        for is_restarted in (False, True):
            for damage in (b"half", b"one\ntwo\n", b"z\n" * 30_000, b"y" * 500_000 + b"\n"):
                asyncio.run(main(is_seen_between, is_restarted, damage))


def test_a_file_that_lost_its_end_in_a_power_cut_goes_on_from_there(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stores.start_run("r")
        path = stores.path("r")
        append(path, b"".join(map(metric, range(1, 101))))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
        path.write_bytes(b"".join(map(metric, range(1, 91))) + b"\x00" * 50)
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
        stores.published.clear()
        stores.end_attempt("r", 1)
        stores.start_attempt("r")
        log = EventLog(path, run_id="r")
        for seq in range(91, 96):
            assert log.append(lambda n: metric(n, 2, step=n + 100)) == seq
        log.flush()
        async with stores.ingesting() as ingest:
            ingest.follow("r", 2)
            await ingest.drain("r")
        for _ in range(20):
            log.append(lambda n: metric(n, 2, step=n + 100))
        log.close()
        async with stores.ingesting() as ingest:
            ingest.follow("r", 2)
            await ingest.drain("r")
        assert stores.published["r"] == list(range(91, 116))
        run = stores.registry.get("r")
        assert (run.last_seq, run.event_offset, run.step) == (115, path.stat().st_size, 215)
        (loss,) = stores.metrics.query("r")
        assert loss.steps[-25:] == list(range(191, 216))

    with caplog.at_level(logging.WARNING, "trn.ingest"):
        asyncio.run(main())
    assert any("has lost events after number 90; 100 was ingested" in text for text in caplog.messages)


def test_a_metric_store_that_lost_its_last_commits_is_caught_up_and_nothing_is_published_again(
    stores: Stores,
) -> None:
    async def main(is_lost_whole: bool) -> None:
        stores.start_run("r")
        path = stores.path("r")
        append(path, b"".join(map(metric, range(1, 50))))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
        with contextlib.closing(sqlite3.connect(stores.home.metrics)) as source:
            old = sqlite3.connect(":memory:")
            source.backup(old)
        append(path, b"".join(map(metric, range(50, 2000))))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
        stores.close()
        for file in stores.home.root.glob("metrics.db*"):
            file.unlink()
        if not is_lost_whole:
            with contextlib.closing(sqlite3.connect(stores.home.metrics)) as target:
                old.backup(target)
        old.close()
        stores.open()
        append(path, metric(2000))
        async with stores.ingesting() as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
        assert stores.published["r"] == list(range(1, 2001))
        (loss,) = stores.metrics.query("r")
        assert (loss.steps, loss.values) == (list(range(1, 2001)), [seq / 2 for seq in range(1, 2001)])

    asyncio.run(main(is_lost_whole=False))


class Failing:
    """Stands before a store; at random a commit of it fails before, or its answer is lost after."""

    def __init__(self, store: Any, method: str, rng: random.Random) -> None:
        self._store, self._method, self._rng = store, method, rng
        self.is_failing = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in (self._method, "rewind") or not self.is_failing:
            return found

        def call(*args: Any, **kwargs: Any) -> "Future[Any]":
            chance = self._rng.random()
            future: Future[Any] = Future()
            if chance < 0.2:
                future.set_exception(UnavailableError("the disk is full"))
                return future
            done = found(*args, **kwargs)
            if chance < 0.4:
                done.result()
                future.set_exception(UnavailableError("the answer was lost"))
                return future
            return done

        return call


@pytest.mark.parametrize("seed", range(8))
def test_every_event_arrives_once_while_commits_fail_the_daemon_dies_and_workers_come_and_go(
    stores: Stores, seed: int
) -> None:
    """Attempts write with a real EventLog in a thread, die leaving damage, and continue; ingest is killed at random."""
    rng = random.Random(seed)
    path = stores.path("r")
    stores.start_run("r")
    is_written = threading.Event()
    attempts = [1]
    may_go_on = threading.Semaphore(0)

    def write(worker_rng: random.Random) -> None:
        for attempt in range(1, 5):
            log = EventLog(path, run_id="r", write_every_s=0.001)
            for _ in range(worker_rng.randrange(200, 900)):
                log.append(lambda seq, number=log.attempt: metric(seq, number, step=seq))
                if worker_rng.random() < 0.02:
                    log.flush()
            log.close()
            append(path, worker_rng.choice([b"", b"half a", b"bad\n", b"\x00" * 3000 + b"\n", b"{}\n" * 400]))
            if attempt < 4:
                attempts.append(attempt + 1)
                may_go_on.acquire(timeout=DEADLINE_S)
        is_written.set()

    async def main() -> None:
        writer = threading.Thread(target=write, args=(random.Random(seed + 1000),))
        writer.start()
        number = 1
        while not is_written.is_set() or len(attempts) > number:
            registry, metrics = Failing(stores.registry, "follow", rng), Failing(stores.metrics, "add", rng)
            real = stores.registry, stores.metrics
            stores.registry, stores.metrics = registry, metrics  # type: ignore[assignment]
            async with stores.ingesting(sweep_s=0.002) as ingest:
                stores.registry, stores.metrics = real
                ingest.follow("r", number)
                for _ in range(rng.randrange(20)):
                    ingest.ring("r")
                    await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
                if rng.random() < 0.4:
                    await ingest.drain("r")
            if len(attempts) > number:
                stores.end_attempt("r", number)
                number = stores.start_attempt("r")
                may_go_on.release()
        writer.join()
        async with stores.ingesting() as ingest:
            ingest.follow("r", number)
            await ingest.drain("r")

    asyncio.run(main())
    last_seq = 0
    for part in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, KeyError):
            last_seq = json.loads(part)["seq"]
    (loss,) = stores.metrics.query("r")
    assert loss.steps == list(range(1, last_seq + 1))
    assert loss.values == [seq / 2 for seq in range(1, last_seq + 1)]
    run = stores.registry.get("r")
    assert (run.last_seq, run.metrics) == (last_seq, {"loss": last_seq / 2})
    # A commit whose daemon died before it published is told by a replay; no number comes twice or out of order.
    published = stores.published["r"]
    assert published == sorted(set(published))


def test_a_failing_store_is_told_once_and_nothing_is_lost_or_doubled(
    stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stores.start_run("r")
        append(stores.path("r"), metric(1) + metric(2))
        real = stores.registry
        failing = Failing(real, "follow", random.Random(0))
        failing._rng.random = lambda: 0.1  # type: ignore[method-assign]
        stores.registry = failing  # type: ignore[assignment]
        async with stores.ingesting(sweep_s=0.001) as ingest:
            stores.registry = real
            ingest.follow("r", 1)
            drained = asyncio.create_task(ingest.drain("r"))
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert not drained.done()
            assert real.get("r").last_seq == 0
            failing.is_failing = False
            await drained
            assert real.get("r").last_seq == 2
        assert stores.published["r"] == [1, 2]

    with caplog.at_level(logging.WARNING, "trn.ingest"):
        asyncio.run(main())
    assert len([text for text in caplog.messages if "the disk is full; will try again" in text]) == 1


def test_a_run_that_floods_does_not_starve_another_and_a_drain_ends_while_it_writes(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("flood")
        stores.start_run("calm")
        flood, stop = stores.path("flood"), threading.Event()

        def write() -> None:
            seq = 1
            with flood.open("ab", buffering=0) as file:
                while not stop.wait(0.002):
                    file.write(b"".join(metric(n) for n in range(seq, seq + 200)))
                    seq += 200

        append(flood, b"")
        writer = threading.Thread(target=write)
        writer.start()
        try:
            async with stores.ingesting() as ingest:
                ingest.follow("flood", 1)
                ingest.follow("calm", 1)
                for seq in range(1, 6):
                    append(stores.path("calm"), metric(seq))
                    await ingest.drain("calm")
                    assert stores.registry.get("calm").last_seq == seq
                    size = flood.stat().st_size
                    await ingest.drain("flood")
                    assert stores.registry.get("flood").event_offset >= size - 200
                assert writer.is_alive()
                stop.set()
                await asyncio.to_thread(writer.join)
                await ingest.drain("flood")
                assert stores.registry.get("flood").event_offset == flood.stat().st_size
        finally:
            stop.set()
            writer.join()

    asyncio.run(main())


def test_many_runs_are_followed_at_once(stores: Stores) -> None:
    async def main() -> None:
        names = [f"run-{number}" for number in range(60)]
        for name in names:
            stores.start_run(name)
        async with stores.ingesting() as ingest:
            for name in names:
                ingest.follow(name, 1)
            for seq in range(1, 4):
                for name in names:
                    append(stores.path(name), metric(seq))
                    ingest.ring(name)
            await asyncio.gather(*(ingest.unfollow(name) for name in names))
        assert all(stores.published[name] == [1, 2, 3] for name in names)

    asyncio.run(main())


def test_when_ingest_stops_whoever_waits_for_it_is_told(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        append(stores.path("r"), metric(1))
        real = stores.registry
        failing = Failing(real, "follow", random.Random(0))
        failing._rng.random = lambda: 0.1  # type: ignore[method-assign]
        stores.registry = failing  # type: ignore[assignment]
        async with stores.ingesting() as ingest:
            stores.registry = real
            ingest.follow("r", 1)
            waiting = asyncio.create_task(ingest.drain("r"))
            await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="ingest has stopped"):
            await waiting
        with pytest.raises(UnavailableError, match="ingest has stopped"):
            await ingest.drain("r")

    asyncio.run(main())


def test_a_watcher_too_slow_for_the_stream_has_all_of_it_after_its_replays(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        path = stores.path("r")
        broadcaster = RunEventBroadcaster(stores.registry, max_items=2)
        ingest = Ingest(
            registry=stores.registry,
            metrics=stores.metrics,
            broadcaster=broadcaster,
            files=Pools({LOCAL_POOL: LocalFiles(stores.home)}),
            home=stores.home,
        )
        task = asyncio.create_task(ingest.run())
        ingest.follow("r", 1)
        seen: list[int] = []

        def take(lines: bytes) -> None:
            seen.extend(json.loads(part)["seq"] for part in lines.split(b"\n")[:-1])

        with broadcaster.watch_events("r", "slow") as watch:
            rng = random.Random(1)
            seq, num_told = 1, 0
            while seq < 600:
                for _ in range(rng.randrange(1, 6)):
                    append(path, b"".join(map(metric, range(seq, seq + 10))))
                    seq += 10
                    await ingest.drain("r")
                news = await watch.next()
                if isinstance(news, FellBehind):
                    num_told += 1
                    assert news.missed_from == (seen[-1] + 1 if seen else 1)
                    start = stores.registry.event_place("r", seen[-1] if seen else 0)[1]
                    until = stores.registry.get("r").event_offset
                    for batch in replay(LocalFile(path), seen[-1] if seen else 0, start, until):
                        take(batch.lines)
                    assert seen[-1] >= news.missed_to
                else:
                    for item in news:
                        fresh = item.item.after(seen[-1] if seen else 0)
                        take(b"" if fresh is None else fresh.lines)
            assert seen == list(range(1, seen[-1] + 1))
            assert seen[-1] >= 590
            assert num_told > 0
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_the_clock_of_growth_is_the_one_that_was_given(stores: Stores) -> None:
    now = 5.0
    clock: Callable[[], float] = lambda: now  # noqa: E731
    stores.start_run("r")
    ingest = Ingest(
        registry=stores.registry,
        metrics=stores.metrics,
        broadcaster=RunEventBroadcaster(stores.registry),
        files=Pools({LOCAL_POOL: LocalFiles(stores.home)}),
        home=stores.home,
        clock=clock,
    )
    ingest.follow("r", 1)
    assert ingest.last_growth("r") == 5.0
    now = 7.0
    assert ingest.last_growth("r") == 5.0
    ingest.follow("r", 2)
    assert ingest.last_growth("r") == 7.0


def test_points_that_cannot_be_stored_hold_up_nothing_and_follow_later(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        append(stores.path("r"), metric(1) + metric(2))
        connection = stores.metrics._connection
        stores.metrics.writer.between(
            lambda: connection.execute("ALTER TABLE points RENAME TO away")
        ).result()
        async with stores.ingesting(sweep_s=0.001) as ingest:
            ingest.follow("r", 1)
            await ingest.drain("r")
            assert stores.registry.get("r").last_seq == 2
            stores.metrics.writer.between(
                lambda: connection.execute("ALTER TABLE away RENAME TO points")
            ).result()
            append(stores.path("r"), metric(3))
            await ingest.drain("r")
            assert stores.metrics.query("r") == []
            ingest._tails["r"].store_again_at = 0.0
            for _ in range(10_000):
                if stores.metrics.query("r"):
                    break
                await asyncio.sleep(0.001)
        [series] = stores.metrics.query("r")
        assert series.num_points == 3
        assert stores.registry.get("r").last_seq == 3

    asyncio.run(main())


def test_an_events_file_that_cannot_be_read_holds_up_nobody(stores: Stores) -> None:
    async def main() -> None:
        stores.start_run("r")
        path = stores.path("r")
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.exists():
            shutil.rmtree(path.parent)
        path.parent.write_text("a file where its folder should be")
        async with stores.ingesting(sweep_s=0.001) as ingest:
            ingest.follow("r", 1)
            for _ in range(20):
                await asyncio.sleep(0.002)  # sweeps go on
            stores.start_run("other")
            append(stores.path("other"), metric(1))
            ingest.follow("other", 1)
            await ingest.drain("other")
        assert stores.registry.get("other").last_seq == 1

    asyncio.run(main())
