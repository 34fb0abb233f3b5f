"""Events on their way from a worker's file to those who watch, and metric points into the store."""

import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from daemon_peers import single_events
from daemon_session import DEADLINE_S, ONE_CPU, POLL_S, Session
from harness import HERE, Prepare, Round, Sample, serve

SUBMIT_PAUSE_S = 0.02
NUM_VALUES = 10


def event_latency(options: Mapping[str, Any]) -> Round:
    """A worker's steps put their clock into their metrics; a watcher looks at its own when it has them."""
    session = Session(Path(options["home"]))
    session.warm()

    async def watch() -> Sample:
        daemon, client = session.daemon, session.client
        job = daemon.job(
            "daemon_trainers:Clocked",
            dataset={"generated": True},
            max_steps=options["num_events"],
            metric_every=1,
            hyperparams={"step_ms": 17},
        )
        run_id = await daemon.submit(client, job)
        late_ms = []
        async with asyncio.timeout(DEADLINE_S), aclosing(client.events(run_id)) as events:
            async for event in events:
                now = time.monotonic()
                if event["event"] == "metric" and event["name"].endswith("at"):
                    late_ms.append(1e3 * (now - event["value"]))
        if len(late_ms) != options["num_events"]:
            raise RuntimeError(f"{len(late_ms)} of {options['num_events']} events came")
        late_ms.sort()
        return {"ms": statistics.median(late_ms), "p99_ms": late_ms[int(len(late_ms) * 0.99)]}

    return lambda: session.run(watch())


def fan_out(options: Mapping[str, Any]) -> Round:
    """A worker that writes as quickly as it can while all follow: events received by all, until all have everything."""
    session = Session(Path(options["home"]))
    session.warm()
    numbers = iter(range(1_000_000))
    num_watchers, num_events = options["num_watchers"], options["num_events"]

    async def follow(run_id: str, attached: list[int]) -> tuple[int, float]:
        """(lines, when the last of them came)."""
        num_lines = 0
        is_attached = False
        last = 0.0
        async with aclosing(session.client.event_lines(run_id)) as batches:
            async for lines in batches:
                num_lines += lines.count(b"\n")
                last = time.perf_counter()
                if not is_attached:
                    is_attached = True
                    attached.append(num_lines)
        return num_lines, last

    async def watch() -> Sample:
        daemon, client = session.daemon, session.client
        go = session.folder / f"go-{next(numbers)}"
        job = daemon.job(
            "daemon_trainers:Chattering",
            dataset={"generated": True},
            max_steps=num_events,
            metric_every=1,
            hyperparams={"go": str(go)},
        )
        run_id = await daemon.submit(client, job)
        attached: list[int] = []
        async with asyncio.timeout(DEADLINE_S):
            followers = [asyncio.create_task(follow(run_id, attached)) for _ in range(num_watchers)]
            while len(attached) < num_watchers:  # each has seen the first events, so each is live
                if any(follower.done() for follower in followers):
                    raise RuntimeError("a watcher ended before it began")
                await asyncio.sleep(POLL_S)
            num_before = sum(attached)
            started = time.perf_counter()
            go.touch()
            results = await asyncio.gather(*followers)
        counts = {num_lines for num_lines, _ in results}
        if len(counts) != 1 or counts.pop() < num_events:
            raise RuntimeError(f"watchers got between {min(results)[0]} and {max(results)[0]} events")
        num_live = sum(num_lines for num_lines, _ in results) - num_before
        seconds = max(last for _, last in results) - started
        return {"events_per_s": num_live / seconds, "seconds": seconds}

    return lambda: session.run(watch())


def points(options: Mapping[str, Any]) -> Round:
    """A worker that writes so many metric points a second, while runs are submitted that wait."""
    session = Session(Path(options["home"]), settings=ONE_CPU)
    session.warm()
    numbers = iter(range(1_000_000))
    rate, seconds = options["points_per_s"], options["seconds"]
    num_steps = int(rate * seconds / NUM_VALUES)

    async def submit_until(is_over: Any) -> list[float]:
        times_ms = []
        while not is_over():
            job = session.daemon.job("daemon_trainers:Trivial", mock_batches=[1], tags={"of": "submits"})
            started = time.perf_counter()
            await session.client.submit(job, base_dir=HERE, priority=-1)
            times_ms.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(SUBMIT_PAUSE_S)
        return times_ms

    async def query(run_id: str, step: int) -> bool:
        found = await session.client.metrics(run_id, [f"value-{NUM_VALUES - 1}"], from_step=step)
        return bool(found) and all(series.num_points > 0 for series in found.values())

    async def write() -> Sample:
        daemon, client = session.daemon, session.client
        number = next(numbers)
        go, first, last = (session.folder / f"{name}-{number}" for name in ("go", "first", "last"))
        job = daemon.job(
            "daemon_trainers:Chattering",
            dataset={"generated": True},
            max_steps=num_steps,
            metric_every=1,
            hyperparams={
                "go": str(go),
                "first": str(first),
                "last": str(last),
                "num_values": NUM_VALUES,
                "points_per_s": rate,
            },
        )
        run_id = await daemon.submit(client, job)
        await daemon.wait_state(client, run_id, "RUNNING")
        until = time.monotonic() + 2.0
        before_ms = await submit_until(lambda: time.monotonic() > until)
        go.touch()
        during_ms = await submit_until(last.exists)
        async with asyncio.timeout(DEADLINE_S):
            while not await query(run_id, num_steps):  # noqa: ASYNC110  (nothing could set an event)
                await asyncio.sleep(POLL_S)
        seen_ns = time.monotonic_ns()
        first_ns, last_ns = int(first.read_text()), int(last.read_text())
        all_steps = await client.metrics(run_id, ["value-0"], max_points=10)
        if all_steps["value-0"].num_points != num_steps:
            raise RuntimeError(f"{all_steps['value-0'].num_points} of {num_steps} points are there")
        await client.wait(run_id)
        await _cancel_waiting(session)
        num_points = num_steps * NUM_VALUES
        return {
            "written_per_s": num_points / (last_ns - first_ns) * 1e9,
            "ingested_per_s": num_points / (seen_ns - first_ns) * 1e9,
            "lag_ms": (seen_ns - last_ns) / 1e6,
            "submit_before_ms": statistics.median(before_ms),
            "submit_during_ms": statistics.median(during_ms),
            "submit_ratio": statistics.median(during_ms) / statistics.median(before_ms),
        }

    return lambda: session.run(write())


async def _cancel_waiting(session: Session) -> None:
    """So that the next round's run is the first in the queue, and has the machine for itself."""
    ids = [run.run_id async for run in session.client.list(states=["PENDING", "DISPATCHING", "RUNNING"])]
    await asyncio.gather(*(session.client.cancel(run_id) for run_id in ids))
    for run_id in ids:
        await session.client.wait(run_id)


SIDES: dict[str, Prepare] = {
    "event_latency": event_latency,
    "fan_out": fan_out,
    "single_events": single_events,
    "points": points,
}

if __name__ == "__main__":
    serve(SIDES)
