"""Ten thousand requests that no client of ours would send: each is answered or cut off, and nothing else is harmed."""

import asyncio
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from frame_workers import make_version
from served_front import Served, encode_request, serving

from gen_worker.inference.front.event_loop import run
from gen_worker.inference.front.front import FrontOptions
from gen_worker.inference.front.http.connection import Connection

NUM_RAW = 6000  # mutated requests, byte for byte
NUM_BODIES = 4500  # well-formed requests with bodies that are not
MAX_BODY_BYTES = 20_000
GOOD = {"rows": [{"x": [1, 2, 3, 4]}]}
HEADERS = (
    "content-type",
    "accept",
    "authorization",
    "expect",
    "x-deadline-ms",
    "x-request-id",
    "transfer-encoding",
    "connection",
)
WORDS = (
    "application/json",
    "text/event-stream",
    "100-continue",
    "chunked",
    "close",
    "0",
    "-1",
    "9" * 40,
    "\xff",
    "a" * 300,
)
TYPES = (
    "application/json",
    "application/json; charset=utf-8",
    "application/vnd.apache.arrow.stream",
    "text/plain",
    "",
)


def arrow_stream() -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"x": pa.array([[1, 2, 3, 4]] * 3, pa.list_(pa.float32(), 4))})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


SEEDS: list[tuple[str, str, Any, str]] = [
    ("POST", "/v1/predict", GOOD, "application/json"),
    ("POST", "/v1/predict", arrow_stream(), "application/vnd.apache.arrow.stream"),
    ("POST", "/v1/stream", {"row": {"x": [0, 2, 0, 0]}}, "application/json"),
    ("POST", "/v1/feedback", {"rows": [{"request_id": "a", "row": 0, "y": 1}]}, "application/json"),
    (
        "POST",
        "/v2/models/demo/infer",
        {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]},
        "application/json",
    ),
    ("GET", "/v2/models/demo", None, ""),
    ("GET", "/v2/models/demo/ready", None, ""),
    ("GET", "/v2", None, ""),
    ("GET", "/v2/health/live", None, ""),
    ("GET", "/v2/health/ready", None, ""),
    ("GET", "/health", None, ""),
    ("GET", "/metrics", None, ""),
    ("GET", "/openapi.json", None, ""),
]


def mutate(rng: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        place = rng.randrange(len(found) + 1)
        kind = rng.randrange(6)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[place : place + rng.randrange(20)]
        elif kind == 2:
            found[place:place] = rng.randbytes(rng.randrange(8))
        elif kind == 3:
            found[place:place] = found[place : place + rng.randrange(40)]
        elif kind == 4:
            found[place:place] = rng.choice(
                (b"\r\n", b"[" * 2000, b'{"a":' * 500, b"\0", b"9" * 400, b"null", b"1e999", b'"\\ud800"')
            )
        else:
            del found[place:]
    return bytes(found)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    if depth > 3 or rng.random() < 0.5:
        return rng.choice((None, True, 0, -1, 1.5, 1e300, 2**63, 2**70, "", "x", "ä" * 50, [], {}))
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    names = ("rows", "row", "x", "y", "inputs", "name", "shape", "data", "datatype", "request_id", "")
    return {rng.choice(names): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def replace_part(rng: random.Random, document: Any) -> Any:
    """The same document with one part of it replaced."""
    if isinstance(document, dict) and document and rng.random() < 0.8:
        name = rng.choice([*document])
        return {**document, name: replace_part(rng, document[name])}
    if isinstance(document, list) and document and rng.random() < 0.8:
        place = rng.randrange(len(document))
        return [*document[:place], replace_part(rng, document[place]), *document[place + 1 :]]
    return random_value(rng)


class Wire:
    """What a connection writes to."""

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def raw_requests(rng: random.Random) -> Iterator[bytes]:
    for number in range(NUM_RAW):
        method, path, body, content_type = SEEDS[number % len(SEEDS)]
        headers = {"content-type": content_type} if content_type else {}
        if rng.random() < 0.5:
            headers[rng.choice(HEADERS)] = rng.choice(WORDS)
        request = encode_request(method, path, body, **headers)
        yield mutate(rng, request) + (encode_request("GET", "/health") if rng.random() < 0.3 else b"")


async def send_raw(served: Served, rng: random.Random) -> None:
    """Straight to connections, in random pieces."""
    reception = served.front.reception
    for number, request in enumerate(raw_requests(rng)):
        wire, connection = Wire(), Connection(reception)
        connection.connection_made(wire)  # type: ignore[arg-type]
        start = 0
        while start < len(request):
            stop = start + rng.choice((1, 7, 100, 100_000))
            connection.data_received(request[start:stop])
            start = stop
        if number % 8 == 0:
            await asyncio.sleep(0)  # so that batches begin before their clients leave
        connection.connection_lost(None)
        assert not wire.sent or wire.sent.startswith(b"HTTP/1.1 "), request


async def send_bodies(served: Served, rng: random.Random, count: int) -> None:
    """Over one connection, as long as it is kept."""
    client = await served.connect()
    for number in range(count):
        method, path, body, content_type = SEEDS[number % len(SEEDS)]
        if rng.random() < 0.1:
            method = rng.choice(("GET", "POST", "PUT", "HEAD", "OPTIONS"))
        if rng.random() < 0.1:
            content_type = rng.choice(TYPES)
        if isinstance(body, bytes):
            body = mutate(rng, body)
        elif body is not None:
            document = replace_part(rng, body)
            body = json.dumps(document).encode()
            if rng.random() < 0.3:
                body = mutate(rng, body)
        reply = await client.ask(
            method, path, body, **({"content-type": content_type} if content_type else {})
        )
        assert reply.status in (200, 400, 404, 405, 413, 415, 429), (path, body, reply.body)
        if reply.headers.get("connection") == "close":
            client = await served.connect()


@pytest.mark.parametrize("seed", [1])
def test_no_request_harms_the_server_or_the_requests_beside_it(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        options = FrontOptions(max_body_bytes=MAX_BODY_BYTES)
        async with serving(
            tmp_path, version=make_version(can_stream=True, max_items=50), replicas=1, options=options
        ) as served:

            async def take(rows: list[dict[str, Any]]) -> dict[str, int]:
                return {"accepted": len(rows)}

            served.front.on_feedback = take
            assert {path.encode() for _, path, _, _ in SEEDS} == set(served.front.reception.routes)
            async with asyncio.TaskGroup() as group:
                group.create_task(send_raw(served, random.Random(seed)))
                for number in range(6):
                    group.create_task(send_bodies(served, random.Random(f"{seed}.{number}"), NUM_BODIES // 6))
            for number in range(20):
                assert (await served.predict([number, 0, 0, 0])).values == [float(number)]
            reception = served.front.reception
            assert reception.unfinished_bytes == 0
            assert served.pool.counters.worker_ends == 0
            assert served.pool.is_idle

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [record.getMessage() for record in caplog.records] == []
