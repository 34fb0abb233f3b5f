"""Claims about the gateway's connections: slow senders are ended, idle ones keep nobody out."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from trn.gateway.gate import guard
from trn.gateway.gate.connections import TimedConnection
from trn.gateway.gate.credentials import Credentials

DEADLINE_S = 60


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[tuple[str, int]]:
    class Limited(TimedConnection):
        pass

    for name, value in limits.items():
        setattr(Limited, name, value)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            answer, http=Limited, ws="none", lifespan="off", log_config=None, access_log=False
        )
        server = uvicorn.Server(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "capture_signals", contextlib.nullcontext)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            yield listener.getsockname()
            server.should_exit = True
            await task


async def ask(place: tuple[str, int], text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(text)
    return reader, writer


@pytest.mark.parametrize("text", [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\nX: "])
def test_a_connection_whose_request_does_not_come_is_ended(text: bytes) -> None:
    async def main() -> None:
        async with serving(head_s=0.2) as place, asyncio.timeout(DEADLINE_S):
            reader, writer = await ask(place, text)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_a_further_request_that_does_not_come_whole_is_ended_too() -> None:
    async def main() -> None:
        async with serving(head_s=0.2) as place, asyncio.timeout(DEADLINE_S):
            reader, writer = await ask(place, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"ok" in await reader.readuntil(b"ok")
            writer.write(b"GET / HT")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_beyond_the_limit_the_oldest_idle_connection_is_closed_and_a_new_one_served() -> None:
    async def main() -> None:
        async with serving(max_connections=3, head_s=DEADLINE_S) as place, asyncio.timeout(DEADLINE_S):
            idle = [await ask(place, b"") for _ in range(3)]
            reader, writer = await ask(place, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"ok" in await reader.readuntil(b"ok")
            with contextlib.suppress(ConnectionError):
                assert await idle[0][0].read() == b""
            for _, each in [*idle, (reader, writer)]:
                each.close()

    asyncio.run(main())


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.05)

    async def never() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(guard.Refused) as refused:
            await guard.read_body("POST", {"content-length": "10"}, never)
        assert refused.value.status == 408

    asyncio.run(main())


def test_a_request_that_the_stop_of_the_gateway_ends_is_answered() -> None:
    """It may be a submit: what a client reads must not be that the gateway failed."""
    credentials = Credentials(1)
    begun = asyncio.Event()

    async def hang(*_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}"}

        guarded = guard.Guard(api=hang, page=hang, credentials=credentials, hosts=["a"])
        headers = {
            "host": "a",
            "authorization": f"Bearer {credentials.bearer}",
            "content-type": "application/json",
        }
        path = "/api/v1/runs"
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        task = asyncio.create_task(guarded(scope, receive, send))
        await begun.wait()
        task.cancel()
        await task
        return sent

    start, body = asyncio.run(main())
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["message"] == guard.STOPPED
