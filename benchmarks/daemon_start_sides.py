"""The daemon's starts: of a run, of a hundred, of itself; and what it costs to do nothing."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil

from daemon_peers import SIDES as PEERS
from daemon_session import DEADLINE_S, Daemon, Session
from harness import Prepare, Round, Sample, serve

MB = 1 << 20


def first_step(options: Mapping[str, Any]) -> Round:
    """From the call of `submit` to the first train_step of a torch trainer."""
    session = Session(Path(options["home"]))
    session.warm()
    numbers = iter(range(1_000_000))

    async def start() -> Sample:
        daemon, client = session.daemon, session.client
        clock = session.folder / f"clock-{next(numbers)}"
        job = daemon.job(
            "daemon_torch_trainer:FirstStep", mock_batches=[1, 2, 3], hyperparams={"clock": str(clock)}
        )
        asked = time.monotonic_ns()
        run_id = await daemon.submit(client, job)
        accepted = time.monotonic_ns()
        run = await client.wait(run_id)
        ended = time.monotonic_ns()
        if run.state != "COMPLETED":
            raise RuntimeError(f"the run is {run.state}: {run.reason}")
        began = int(clock.read_text())
        return {
            "ms": (began - asked) / 1e6,
            "submit_ms": (accepted - asked) / 1e6,
            "completed_ms": (ended - asked) / 1e6,
        }

    session.run(start())  # the client's own imports and its connection
    return lambda: session.run(start())


def burst(options: Mapping[str, Any]) -> Round:
    """So many runs at once, from the first submit until the last is known to be completed."""
    session = Session(Path(options["home"]))
    session.warm()

    async def carry(num_runs: int) -> Sample:
        daemon, client = session.daemon, session.client
        jobs = [daemon.job("daemon_trainers:Trivial", mock_batches=[1]) for _ in range(num_runs)]
        change = (await client.health()).last_change
        started = time.perf_counter()
        missing = set(await asyncio.gather(*(daemon.submit(client, job) for job in jobs)))
        submitted_s = time.perf_counter() - started
        async with aclosing(client.watch(after_change=change)) as changes, asyncio.timeout(DEADLINE_S):
            async for run in changes:
                if run.is_terminal and run.state != "COMPLETED":
                    raise RuntimeError(f"a run is {run.state}: {run.reason}")
                if run.is_terminal:
                    missing.discard(run.run_id)
                if not missing:
                    break
        seconds = time.perf_counter() - started
        return {"runs_per_s": num_runs / seconds, "submitted_ms": 1e3 * submitted_s}

    session.run(carry(4))
    return lambda: session.run(carry(options["num_runs"]))


def serving(options: Mapping[str, Any]) -> Round:
    """From the spawn of a daemon in a new home to its first answer."""
    numbers = iter(range(1_000_000))

    async def first_answer(daemon: Daemon) -> float:
        async with daemon.client() as client:
            await client.health()
            return time.monotonic() - daemon.started

    def start() -> Sample:
        with Daemon(Path(options["home"]) / str(next(numbers))) as daemon:
            daemon.wait_announced()
            return {"s": asyncio.run(first_answer(daemon))}

    start()  # page cache, and the client's imports
    return start


def idle(options: Mapping[str, Any]) -> Round:
    """What the daemon holds and uses while nobody asks for anything; it has carried some runs before."""
    session = Session(Path(options["home"]))
    session.warm()

    async def carry_some() -> None:
        daemon, client = session.daemon, session.client
        for _ in range(3):
            await client.wait(
                await daemon.submit(client, daemon.job("daemon_trainers:Trivial", mock_batches=[1]))
            )
        await client.close()

    session.run(carry_some())
    process = psutil.Process(session.daemon.process.pid)

    def used_s() -> float:
        times = process.cpu_times()
        return times.user + times.system

    def rest() -> Sample:
        time.sleep(1.0)
        before_s, started = used_s(), time.monotonic()
        time.sleep(options["seconds"])
        percent = 100 * (used_s() - before_s) / (time.monotonic() - started)
        memory = process.memory_full_info()
        launchers = [launcher.memory_full_info() for launcher in session.daemon.launchers()]
        return {
            "percent": percent,
            "resident_mb": memory.rss / MB,
            "own_mb": memory.uss / MB,
            "launcher_resident_mb": sum(found.rss for found in launchers) / MB,
            "launcher_own_mb": sum(found.uss for found in launchers) / MB,
        }

    return rest


SIDES: dict[str, Prepare] = {
    "first_step": first_step,
    "burst": burst,
    "serving": serving,
    "idle": idle,
    **PEERS,
}

if __name__ == "__main__":
    serve(SIDES)
