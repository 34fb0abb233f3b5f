"""Clients of a model server under faults: patient, slow, in a hurry, gone, and such that send rows that do harm.

Each request is written down with what came back; nothing is judged here: `serving_checker` does that.
"""

import asyncio
import contextlib
import io
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from served_front import Client, Reply, encode_request

from gen_worker.contract.serving import read_live
from gen_worker.errors import StartupError

sys.path.insert(0, str(Path(__file__).parent / "trainers"))
from soaked import EXITS, KILLS, RAISES, RAISES_ONCE, WIDTH

MAX_BATCH_ROWS = 16
MAX_QUEUE_ROWS = 256
FLOOD, FLOOD_ROWS = 60, 12  # more than can wait
PIPELINED = 6
LOOK_EVERY_S = 0.05
ARROW = "application/vnd.apache.arrow.stream"
CLOSED = (OSError, EOFError)  # asyncio's IncompleteReadError is an EOFError
NEVER_ANSWERED, ONCE_RAISED = "never answered", "raises once"


@dataclass(slots=True, kw_only=True)
class Request:
    """One request, and what became of it."""

    request_id: str
    kind: str
    rows: np.ndarray  # type: ignore[type-arg]
    connection: int  # a number; on one connection answers come in order
    connected_at: float
    sent_at: float
    order: int = 0  # requests of one connection with the same number were sent without waiting
    deadline_ms: int | None = None
    harm: str = ""  # what its rows do: one of those above
    status: int = 0  # 0: the connection ended, or its client left
    ended_at: float = 0.0
    has_left: bool = False
    label: str = ""
    weights: str = ""
    shape: int = 0
    values: Sequence[float] = ()
    error: str = ""
    fault: str = ""  # of the reply itself


@dataclass
class Record:
    """What all clients saw."""

    requests: list[Request] = field(default_factory=list)
    worker_pids: set[int] = field(default_factory=set)  # who answered
    last_answered_at: float = 0.0
    stuck: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Clients:
    """All of them, in tasks of their own, until `is_over`."""

    def __init__(self, serving: Path, *, seed: int, record: Record, is_over: Callable[[], bool]) -> None:
        self._serving = serving
        self._seed = seed
        self._record = record
        self._is_over = is_over
        self._num_connections = 0
        self._num_requests = 0

    async def run(self) -> None:
        kinds = [
            *[self._patient] * 4,
            *[self._arrow] * 2,
            self._pipelining,
            self._hasty,
            self._slow,
            self._leaving,
            self._harmful,
            self._flooding,
        ]
        async with asyncio.TaskGroup() as tasks:
            for number, kind in enumerate(kinds):
                dice = random.Random(f"{self._seed}/client {number}")
                tasks.create_task(self._insist(kind, dice))

    async def _insist(self, kind: Callable[..., "asyncio._CoroutineLike[None]"], dice: random.Random) -> None:
        """A client connects again where its connection ends."""
        while not self._is_over():
            with contextlib.suppress(*CLOSED):
                connection = await self._connect()
                try:
                    while not self._is_over():
                        await kind(connection, dice)
                        if connection.is_used_up:
                            break
                finally:
                    connection.client.abort()
                continue
            await asyncio.sleep(LOOK_EVERY_S)

    # Kinds of clients. Each call is a request, or a few.

    async def _patient(self, connection: "Connection", dice: random.Random) -> None:
        size = dice.choice([1, 1, 1, 2, 3, 5, 8, 13, 16, 40])
        await self._ask(connection, self._rows(dice, size), "patient")
        await asyncio.sleep(dice.random() * 0.02)

    async def _arrow(self, connection: "Connection", dice: random.Random) -> None:
        await self._ask(connection, self._rows(dice, dice.choice([1, 4, 16, 33])), "arrow", is_arrow=True)
        await asyncio.sleep(dice.random() * 0.02)

    async def _pipelining(self, connection: "Connection", dice: random.Random) -> None:
        requests = [
            self._begin(connection, self._rows(dice, dice.randint(1, 6)), "pipelined")
            for _ in range(PIPELINED)
        ]
        connection.client.writer.write(b"".join(self._encode(connection, request) for request in requests))
        try:
            for request in requests:
                await self._read(connection, request)
        finally:
            for request in requests:
                request.ended_at = request.ended_at or time.monotonic()
        await asyncio.sleep(dice.random() * 0.05)

    async def _hasty(self, connection: "Connection", dice: random.Random) -> None:
        deadline_ms = dice.choice([1, 2, 5, 20, 100])
        await self._ask(connection, self._rows(dice, dice.randint(1, 16)), "hasty", deadline_ms=deadline_ms)

    async def _slow(self, connection: "Connection", dice: random.Random) -> None:
        request = self._begin(connection, self._rows(dice, 3), "slow")
        content = self._encode(connection, request)
        step = max(1, len(content) // 6)
        for start in range(0, len(content), step):
            connection.client.writer.write(content[start : start + step])
            await asyncio.sleep(dice.random() * 0.1)
        await self._read(connection, request)

    async def _leaving(self, connection: "Connection", dice: random.Random) -> None:
        request = self._begin(connection, self._rows(dice, dice.choice([1, 8, 40])), "leaving")
        request.has_left = True
        content = self._encode(connection, request)
        share = dice.choice([len(content) // 2, len(content), len(content)])
        connection.client.writer.write(content[:share])
        await asyncio.sleep(dice.choice([0, 0.001, 0.01, 0.1]))
        connection.is_used_up = True
        self._record.counts["clients that left"] += 1

    async def _harmful(self, connection: "Connection", dice: random.Random) -> None:
        rows = self._rows(dice, dice.choice([1, 3, 5, 20]))
        kind = dice.choice([RAISES, RAISES, RAISES_ONCE, RAISES_ONCE, KILLS, EXITS])
        rows[dice.randrange(len(rows)), 0] = kind
        harm = ONCE_RAISED if kind == RAISES_ONCE else NEVER_ANSWERED
        await self._ask(connection, rows, "harmful", harm=harm)
        self._record.counts["requests with rows that raise or kill"] += 1
        await asyncio.sleep(dice.random() * 0.3)

    async def _flooding(self, connection: "Connection", dice: random.Random) -> None:
        async def ask_once() -> None:
            own = await self._connect()
            try:
                await self._ask(own, self._rows(dice, FLOOD_ROWS), "flooding")
            finally:
                own.client.abort()

        found = await asyncio.gather(*(ask_once() for _ in range(FLOOD)), return_exceptions=True)
        for fault in found:
            if isinstance(fault, BaseException) and not isinstance(fault, CLOSED):
                raise fault
        self._record.counts["floods"] += 1
        await asyncio.sleep(0.5 + dice.random())

    # One request.

    async def _connect(self) -> "Connection":
        try:
            live = await asyncio.to_thread(read_live, self._serving)
            bearer = (self._serving / "bearer").read_text().strip()
        except StartupError as fault:  # it is written by rename: that must not be
            self._record.stuck.append(f"live.json: {fault}")
            raise OSError from fault
        if live is None or not live.url:
            raise ConnectionRefusedError
        host, _, port = live.url.removeprefix("http://").rpartition(":")
        began = time.monotonic()  # before it: what a loop with much to do sees late was so earlier
        async with asyncio.timeout(60):
            streams = await asyncio.open_connection(host, int(port))
        self._num_connections += 1
        return Connection(client=Client(*streams), bearer=bearer, number=self._num_connections, at=began)

    async def _ask(
        self,
        connection: "Connection",
        rows: np.ndarray,  # type: ignore[type-arg]
        kind: str,
        *,
        deadline_ms: int | None = None,
        is_arrow: bool = False,
        harm: str = "",
    ) -> None:
        request = self._begin(connection, rows, kind, deadline_ms=deadline_ms, harm=harm)
        connection.client.writer.write(self._encode(connection, request, is_arrow=is_arrow))
        await self._read(connection, request)

    def _begin(
        self,
        connection: "Connection",
        rows: np.ndarray,  # type: ignore[type-arg]
        kind: str,
        *,
        deadline_ms: int | None = None,
        harm: str = "",
    ) -> Request:
        self._num_requests += 1
        request = Request(
            request_id=f"{kind}-{self._num_requests}",
            kind=kind,
            rows=rows,
            connection=connection.number,
            connected_at=connection.at,
            sent_at=time.monotonic(),
            order=connection.num_waits,
            deadline_ms=deadline_ms,
            harm=harm,
        )
        self._record.requests.append(request)
        return request

    @staticmethod
    def _encode(connection: "Connection", request: Request, *, is_arrow: bool = False) -> bytes:
        headers = {"x_request_id": request.request_id, "authorization": f"Bearer {connection.bearer}"}
        if request.deadline_ms is not None:
            headers["x_deadline_ms"] = str(request.deadline_ms)
        body: object = {"rows": [{"x": row} for row in request.rows.tolist()]}
        if is_arrow:
            headers |= {"content_type": ARROW, "accept": ARROW}
            x = pa.FixedSizeListArray.from_arrays(pa.array(request.rows.reshape(-1)), WIDTH)
            batch = pa.record_batch({"x": x})
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            body = sink.getvalue()
        return encode_request("POST", "/v1/predict", body, **headers)

    async def _read(self, connection: "Connection", request: Request) -> None:
        """EOFError or OSError where the connection ends."""
        try:
            reply = await connection.client.read()
        except TimeoutError:
            self._record.stuck.append(f"{request.request_id} was not answered")
            raise OSError from None
        finally:
            request.ended_at = time.monotonic()
        connection.num_waits += 1
        request.status = reply.status
        if reply.headers.get("x-request-id") != request.request_id:
            request.fault = f"the reply is that of {reply.headers.get('x-request-id')}"
        if reply.status == 200:
            request.label = f"{reply.headers['x-trn-run']}@{reply.headers['x-trn-step']}"
            request.weights = reply.headers["x-trn-weights"]
            request.shape = int(reply.headers["x-trn-batch-shape"])
            self._take_values(request, reply)
            self._record.last_answered_at = request.sent_at
        else:
            request.error = json.loads(reply.body)["error"]["kind"]
            if reply.status in (429, 503) and "retry-after" not in reply.headers:
                request.fault = f"{reply.status} without Retry-After"
        if reply.headers.get("connection", "").lower() == "close":
            connection.is_used_up = True

    def _take_values(self, request: Request, reply: Reply) -> None:
        if reply.headers["content-type"] == ARROW:
            with pa.ipc.open_stream(reply.body) as reader:
                rows = reader.read_all().to_pylist()
        else:
            rows = reply.json["rows"]
        request.values = [row["y"] for row in rows]
        self._record.worker_pids.update(row["pid"] for row in rows)

    @staticmethod
    def _rows(dice: random.Random, size: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([[dice.gauss(0, 1) for _ in range(WIDTH)] for _ in range(size)], "float32")


@dataclass(slots=True, kw_only=True)
class Connection:
    client: Client
    bearer: str
    number: int
    at: float
    num_waits: int = 0
    is_used_up: bool = False
