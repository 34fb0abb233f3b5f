"""Claims about one live stream: it continues where it was left, and a reader that is stuck slows nobody."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from trn.core.errors import InvalidRequestError, NotFoundError
from trn.gateway import event_stream
from trn.gateway.event_stream import EventStreamResponse, Outbox, Place, read_position, write_position

DEADLINE_S = 60


class Reader:
    """Takes what is sent, each message only when it is let; leaves when it has seen enough."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.news = asyncio.Event()
        self.left = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        await self.may_take.wait()
        self.seen += message.get("body", b"").decode().split("\n\n")
        self.news.set()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def wait_for(self, text: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(text in message for message in self.seen):
                self.news.clear()
                await self.news.wait()


class Counting:
    """A source that never ends: every number is a message."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.at = 0
        self.end = 1 << 30

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:
        self.at = position["n"]
        self.begins.append(self.at)
        while self.at < self.end:
            await outbox.put("number", b"%d" % (self.at + 1), Place("n", self.at + 1))
            self.at += 1
            await asyncio.sleep(0)
        await asyncio.Event().wait()


def stream(
    source: Any, position: dict[str, int], now: int = 0
) -> tuple[EventStreamResponse, asyncio.Event, list[str]]:
    stopped, left = asyncio.Event(), []

    async def renew() -> dict[str, int]:
        return {"n": now}

    made = EventStreamResponse(
        [source], position, renew=renew, stopped=stopped, leave=lambda: left.append("left")
    )
    return made, stopped, left


def test_a_reader_that_is_stuck_is_told_to_fetch_again_and_the_source_waits_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_stream, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(event_stream, "STUCK_S", 0.05)

    async def main() -> None:
        reader, source = Reader(), Counting()
        response, _, left = stream(source, {"n": 0}, now=5_000_000)
        task = asyncio.create_task(response({}, reader.receive, reader.send))
        await reader.wait_for("event: number")
        reader.may_take.clear()
        before = -1
        while before != source.at:  # it waits for room
            before = source.at
            await asyncio.sleep(0.1)
        assert source.at < 5000
        reader.may_take.set()
        await reader.wait_for("event: reset")
        await reader.wait_for("data: 5000001")
        assert source.begins == [0, 5_000_000]
        reader.left.set()
        async with asyncio.timeout(DEADLINE_S):
            await task
        assert left == ["left"]

    asyncio.run(main())


def test_a_reader_that_takes_nothing_at_all_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "GONE_S", 0.05)

    async def main() -> None:
        reader, source = Reader(), Counting()
        response, _, left = stream(source, {"n": 0})
        task = asyncio.create_task(response({}, reader.receive, reader.send))
        await reader.wait_for("event: number")
        reader.may_take.clear()
        async with asyncio.timeout(DEADLINE_S):
            await task
        assert left == ["left"]

    asyncio.run(main())


def test_a_stream_ends_with_the_gateway_and_begins_where_it_is_told_to() -> None:
    async def main() -> None:
        reader, source = Reader(), Counting()
        source.end = 12
        response, stopped, left = stream(source, {"n": 9})
        task = asyncio.create_task(response({}, reader.receive, reader.send))
        await reader.wait_for("data: 12")
        numbers = [message for message in reader.seen if "event: number" in message]
        assert numbers == [f"event: number\nid: n={at}\ndata: {at}" for at in (10, 11, 12)]
        stopped.set()
        async with asyncio.timeout(DEADLINE_S):
            await task
        assert left == ["left"]

    asyncio.run(main())


def test_a_source_that_is_gone_is_said_and_ends_nothing_else() -> None:
    async def gone(outbox: Outbox, position: Mapping[str, int]) -> None:
        raise NotFoundError("there is no run 'x'")

    async def main() -> None:
        reader = Reader()
        response, stopped, _ = stream(gone, {"n": 0})
        task = asyncio.create_task(response({}, reader.receive, reader.send))
        await reader.wait_for("event: fault")
        stopped.set()
        async with asyncio.timeout(DEADLINE_S):
            await task

    asyncio.run(main())


def test_a_position_is_read_as_it_was_written_and_others_are_refused() -> None:
    position = {"c": 5, "r": 0, "e:run-1.2": 17, "l:run-1.2": 4096}
    assert read_position(write_position(position), set(position)) == position
    assert read_position(write_position(position), {"c"}) == {"c": 5}
    assert read_position("", {"c"}) == {}
    for text in ("c", "=5", "c=-1", "c=5;r=x", "c=" + "9" * 19, "c=٣"):
        with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
            read_position(text, {"c"})
