"""What calls cost: durable submits beside empty calls, and everything again with ten thousand runs in the queue.

The client is this process, the daemon another. One run holds the daemon's only CPU, so that what is submitted waits.
"""

import asyncio
import itertools
import random
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2

from daemon_session import ONE_CPU, Session
from harness import HERE, Prepare, Round, Sample, serve
from trn.core.home import socket_address
from trn.daemon.dispatch.dispatcher import WINDOW
from trn.daemon.dispatch.placement import FreeResources, choose_starts
from trn.proto import trainer_pb2 as pb
from trn.proto.methods import METHODS
from trn.registry.reader import RegistryReader

Call = Callable[[], Awaitable[object]]


class RawCalls:
    """Calls without our client around them: an empty one, and a submit."""

    def __init__(self, session: Session, socket: str = "") -> None:
        """`socket` is of another server than the session's daemon."""
        socket = socket or socket_address(session.daemon.home.socket)
        options = [("grpc.default_authority", "localhost")]
        self.channel = grpc.aio.insecure_channel(f"unix:{socket}", options=options)
        self._check = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        submit = METHODS["SubmitRun"]
        self._submit = self.channel.unary_unary(
            submit.path,
            request_serializer=submit.request.SerializeToString,
            response_deserializer=submit.response.FromString,
        )
        self._daemon = session.daemon

    async def empty(self) -> None:
        await self._check(health_pb2.HealthCheckRequest())

    async def submit(self) -> None:
        job = self._daemon.job("daemon_trainers:Trivial", mock_batches=[1])
        answer = await self._submit(
            pb.Submission(
                config_json=msgspec.json.encode(job), base_dir=str(HERE), interpreter=sys.executable
            )
        )
        if answer.existed or answer.run.state != pb.RUN_STATE_PENDING:
            raise RuntimeError("the submit made no new run that waits")


async def rate(call: Call, *, num_in_flight: int, seconds: float) -> float:
    """Calls a second."""
    num_done = 0
    started = time.perf_counter()

    async def repeat() -> None:
        nonlocal num_done
        while time.perf_counter() - started < seconds:
            await call()
            num_done += 1

    await asyncio.gather(*(repeat() for _ in range(num_in_flight)))
    return num_done / (time.perf_counter() - started)


class DurableCommits:
    """The limit below every durable submit: a row and its commit, synced, without any call around it."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, text TEXT)")

    def rate(self, seconds: float) -> float:
        num_done = 0
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._database.execute("INSERT INTO rows (text) VALUES (?)", ("x" * 400,))
            num_done += 1
        return num_done / (time.perf_counter() - started)


def start_commit_server(folder: Path) -> str:
    """Its socket. It ends with this process."""
    socket = folder / "commits.sock"
    process = subprocess.Popen(
        [sys.executable, HERE / "daemon_commit_server.py", socket, folder / "commits.db"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"serving\n":
        raise RuntimeError("the server that only commits did not start")
    return str(socket)


def submits(options: Mapping[str, Any]) -> Round:
    """Empty calls and submits, one and 32 in flight, in a new order each round."""
    session = _held_session(Path(options["home"]))
    rng = random.Random(1)

    async def make_raw() -> RawCalls:
        raw = RawCalls(session)
        await raw.empty()
        await raw.submit()
        return raw

    raw = session.run(make_raw())
    commits = DurableCommits(session.folder / "floor.db")
    socket = start_commit_server(session.folder)

    async def make_floor() -> RawCalls:
        floor = RawCalls(session, socket)
        await floor.submit()
        return floor

    floor = session.run(make_floor())

    async def submit() -> None:
        job = session.daemon.job("daemon_trainers:Trivial", mock_batches=[1])
        if (await session.client.submit(job, base_dir=HERE)).existed:
            raise RuntimeError("the submit made no new run")

    calls: dict[str, Call] = {
        "empty": raw.empty,
        "submit": raw.submit,
        "client": submit,
        "floor": floor.submit,
    }

    async def take() -> Sample:
        sample: Sample = {}
        todo = list(itertools.product(calls, (1, 32)))
        rng.shuffle(todo)
        for name, number in todo:
            sample[f"{name}_{number}_per_s"] = await rate(
                calls[name], num_in_flight=number, seconds=options["seconds"]
            )
        sample["commit_per_s"] = commits.rate(options["seconds"])
        return sample

    return lambda: session.run(take())


def queue(options: Mapping[str, Any]) -> Round:
    """Two daemons, one with a short queue and one with a long one, asked in turn."""
    short = _held_session(Path(options["home"]) / "short")
    long = _held_session(Path(options["home"]) / "long")
    sessions = {"short": short, "long": long}
    readers = {}
    for (name, session), num_runs in zip(sessions.items(), (100, options["num_runs"]), strict=True):
        session.run(_fill(session, num_runs))
        readers[name] = RegistryReader(session.daemon.home.registry)

    async def submit(session: Session) -> None:
        job = session.daemon.job("daemon_trainers:Trivial", mock_batches=[1])
        await session.client.submit(job, base_dir=HERE)

    async def page(session: Session) -> None:
        count = 0
        async for _run in session.client.list(states=["PENDING"], page_size=100):
            count += 1
            if count == 100:
                break

    def decide(reader: RegistryReader) -> None:
        """What a round of the dispatcher reads and decides, as it does it."""
        now_ms = time.time_ns() // 1_000_000
        waiting = reader.queue(now_ms, WINDOW)
        reader.slots()
        cpus, _ = reader.held()
        if choose_starts(waiting, FreeResources(cpus=1 - cpus), now_ms=now_ms, patience_s=300).starts:
            raise RuntimeError("a run would start, though the only CPU is held")

    def take() -> Sample:
        times: dict[str, list[float]] = {}
        for number in range(options["num_calls"]):
            for name in sorted(sessions, reverse=bool(number % 2)):
                session = sessions[name]
                for what in (submit, page):
                    started = time.perf_counter()
                    session.run(what(session))
                    times.setdefault(f"{what.__name__}_{name}_ms", []).append(
                        1e3 * (time.perf_counter() - started)
                    )
                started = time.perf_counter()
                decide(readers[name])
                times.setdefault(f"decide_{name}_ms", []).append(1e3 * (time.perf_counter() - started))
        sample = {key: statistics.median(values) for key, values in times.items()}
        for what_ in ("submit", "page", "decide"):
            sample[f"{what_}_ratio"] = sample[f"{what_}_long_ms"] / sample[f"{what_}_short_ms"]
        return sample

    return take


def _held_session(home: Path) -> Session:
    session = Session(home, settings=ONE_CPU)
    session.run(session.daemon.hold(session.client))
    return session


async def _fill(session: Session, num_runs: int) -> None:
    raw = RawCalls(session)
    numbers = iter(range(num_runs))

    async def repeat() -> None:
        for _ in numbers:
            await raw.submit()

    await asyncio.gather(*(repeat() for _ in range(32)))
    await raw.channel.close()


SIDES: dict[str, Prepare] = {"submits": submits, "queue": queue}

if __name__ == "__main__":
    serve(SIDES)
