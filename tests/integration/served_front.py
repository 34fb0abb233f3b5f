"""A front with real model processes (`frame_workers`) behind it, on a Unix socket, and clients that may misbehave."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frame_workers import FrameParent, make_version

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.inference.front.front import Front, FrontOptions
from gen_worker.inference.front.pool import ReplicaPool
from gen_worker.inference.front.queries import DEFAULT_LIMITS, QueueLimits
from gen_worker.inference.front.workers.model_processes import ModelProcesses
from gen_worker.inference.model.orders import ModelOptions

log = logging.getLogger("test.front")
PATIENCE_S = 60.0


@dataclass(kw_only=True)
class Served:
    """All of it, in one loop."""

    folder: Path
    parent: FrameParent
    processes: ModelProcesses
    front: Front
    pools: list[ReplicaPool] = field(default_factory=list)
    clients: "list[Client]" = field(default_factory=list)
    url: str = ""

    @property
    def pool(self) -> ReplicaPool:
        return self.pools[0]

    @property
    def path(self) -> str:
        return self.url.removeprefix("unix:")

    async def open_pool(
        self,
        version: ModelVersion | None = None,
        replicas: int = 1,
        max_batch_rows: int = 8,
        limits: QueueLimits = DEFAULT_LIMITS,
    ) -> ReplicaPool:
        pool = ReplicaPool(
            version or make_version(),
            self.processes,
            ModelOptions(max_batch_rows=max_batch_rows),
            replicas,
            limits=limits,
            log=log,
        )
        await pool.open()
        self.pools.append(pool)
        return pool

    async def connect(self) -> "Client":
        client = Client(*await asyncio.open_unix_connection(self.path))
        self.clients.append(client)
        return client

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> "Reply":
        """One request on a connection of its own."""
        client = await self.connect()
        try:
            return await client.ask(method, path, body, **headers)
        finally:
            await client.close()

    async def predict(self, *rows: Any, **headers: str) -> "Reply":
        return await self.ask("POST", "/v1/predict", {"rows": [{"x": row} for row in rows]}, **headers)


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def values(self) -> list[float]:
        assert self.status == 200, (self.status, self.body)
        return [row["y"] for row in self.json["rows"]]

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


class Client:
    """HTTP by hand: what is sent is what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        self.send(method, path, body, **headers)
        return await self.read()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.writer.write(encode_request(method, path, body, **headers))

    async def read(self) -> Reply:
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ")[1])
            headers = {}
            for line in head[1:-2]:
                name, _, value = line.partition(": ")
                assert name.lower() not in headers, f"{name} is there twice"
                headers[name.lower()] = value
            if headers.get("transfer-encoding") == "chunked":
                body = await self._read_chunks()
            else:
                body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(status=status, headers=headers, body=body)

    async def _read_chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await self.reader.readline(), 16)
            body += (await self.reader.readexactly(size + 2))[:-2]
            if size == 0:
                return body

    async def read_to_end(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def abort(self) -> None:
        """As a client whose process is killed."""
        self.writer.transport.abort()


def encode_request(method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """`content_type="…"` becomes `content-type`. A body that is not bytes is sent as JSON."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        named.setdefault("content-type", "application/json")
    if body is not None:
        named["content-length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    version: ModelVersion | None = None,
    replicas: int = 1,
    max_batch_rows: int = 8,
    limits: QueueLimits = DEFAULT_LIMITS,
    options: FrontOptions = FrontOptions(),  # noqa: B008
    **reception: Any,
) -> AsyncIterator[Served]:
    """`reception` changes limits of connections that options do not have."""
    parent = FrameParent()
    processes = ModelProcesses(parent, log=log, gone=_refuse_gone)
    front = Front(options, name="demo", log=log)
    for name, value in reception.items():
        setattr(front.reception, name, value)
    served = Served(folder=folder, parent=parent, processes=processes, front=front)
    try:
        front.switch(
            await served.open_pool(version, replicas=replicas, max_batch_rows=max_batch_rows, limits=limits)
        )
        served.url = await front.open(f"unix:{folder}/s")
        yield served
    finally:
        for client in served.clients:
            await client.close()
        await front.drain(0)
        for pool in served.pools:
            await pool.close()
        processes.close()
        parent.close()


def _refuse_gone(fault: Exception) -> None:
    raise fault


async def until(condition: Any) -> None:
    """Wait for something that this loop does, or that a process does to it."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (a process does it)
            await asyncio.sleep(0.005)
