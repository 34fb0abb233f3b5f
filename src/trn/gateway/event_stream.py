"""One live stream of a page: several sources, one connection, a position in every message.

A source waits while its reader has more than MAX_WAITING_BYTES before it, and so the daemon's own stream waits: memory
is bounded and no other reader is slowed. A reader that was stuck for a while gets `reset`: it fetches anew what it shows,
and the stream continues from now.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from trn.core.errors import InvalidRequestError, TrnError

MAX_WAITING_BYTES = 1 << 20
PING_S = 15.0
STUCK_S = 5.0  # of a reader that takes nothing, before it gets `reset`
GONE_S = 60.0  # before it is given up
RETRY_MS = 1000
MEDIA_TYPE = "text/event-stream"


class Place(NamedTuple):
    """Where in one source a message ends: `c` for runs, `r` for removed ones, `e:RUN`, `l:RUN`."""

    source: str
    at: int


class StreamMessage(NamedTuple):
    event: str
    data: bytes  # JSON, in one line
    place: Place | None = None


FELL_BEHIND = StreamMessage("reset", b'{"reason":"this reader fell behind"}')


class Outbox:
    """What waits for the reader. `put` waits for room."""

    def __init__(self) -> None:
        self._messages: deque[StreamMessage] = deque()
        self._size = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._size > MAX_WAITING_BYTES

    async def put(self, event: str, data: bytes, place: Place | None = None) -> None:
        while self.is_full:
            self._room.clear()
            await self._room.wait()
        self._messages.append(StreamMessage(event, data, place))
        self._size += len(data)
        self._news.set()

    async def take(self) -> list[StreamMessage]:
        """All that waits; something, or nothing after PING_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PING_S):
                await self._news.wait()
        taken, self._messages, self._size = list(self._messages), deque(), 0
        self._news.clear()
        self._room.set()
        return taken


# Puts messages from the given position on into the outbox, until it is cancelled.
Source = Callable[[Outbox, Mapping[str, int]], Awaitable[None]]


class EventStreamResponse(Response):
    """Server-sent events of `sources`, from `position` on. `renew` gives the position of now, after a reset."""

    def __init__(
        self,
        sources: list[Source],
        position: dict[str, int],
        *,
        renew: Callable[[], Awaitable[dict[str, int]]],
        stopped: asyncio.Event,
        leave: Callable[[], None],
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type=MEDIA_TYPE
        )
        self._sources = sources
        self._position = position
        self._renew = renew
        self._stopped = stopped
        self._leave = leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        sending = asyncio.create_task(self._send_all(send, headers))
        leaving = [asyncio.create_task(_gone(receive)), asyncio.create_task(self._stopped.wait())]
        try:
            await asyncio.wait([sending, *leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave()
            for task in (sending, *leaving):
                task.cancel()
            results = await asyncio.gather(sending, *leaving, return_exceptions=True)
        if self._stopped.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif isinstance(results[0], Exception) and not isinstance(results[0], TimeoutError):
            raise results[0]

    async def _send_all(self, send: Any, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        begin = f"retry: {RETRY_MS}\nid: {write_position(self._position)}\n\n".encode()
        await _send(send, begin)
        while True:
            outbox = Outbox()
            tasks = [
                asyncio.create_task(_run(source, outbox, dict(self._position))) for source in self._sources
            ]
            try:
                reset = await self._forward(outbox, send, tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self._position = await self._renew()
            await _send(send, self._write(reset))

    async def _forward(self, outbox: Outbox, send: Any, tasks: "list[asyncio.Task[None]]") -> StreamMessage:
        """Returns the `reset` that the reader has to be told."""
        while True:
            messages = await outbox.take()
            for task in tasks:
                if task.done() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
            begun = time.monotonic()
            for message in messages:
                if message.event == "reset":
                    return message
                await _send(send, self._write(message))
            if not messages:
                await _send(send, b": ping\n\n")
            if outbox.is_full and time.monotonic() - begun > STUCK_S:
                return FELL_BEHIND

    def _write(self, message: StreamMessage) -> bytes:
        if message.place is not None:
            self._position[message.place.source] = message.place.at
        return b"event: %b\nid: %b\ndata: %b\n\n" % (
            message.event.encode(),
            write_position(self._position).encode(),
            message.data,
        )


async def _send(send: Any, data: bytes) -> None:
    async with asyncio.timeout(GONE_S):
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _run(source: Source, outbox: Outbox, position: Mapping[str, int]) -> None:
    try:
        await source(outbox, position)
    except TrnError as fault:  # the run was removed, say
        await outbox.put("fault", msgspec.json.encode({"message": str(fault)}))


def write_position(position: Mapping[str, int]) -> str:
    return ";".join(f"{source}={at}" for source, at in position.items())


def read_position(text: str, sources: set[str]) -> dict[str, int]:
    """What `write_position` made, of these sources alone. InvalidRequestError."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(";")):
        source, _, at = part.rpartition("=")
        if not source or not at.isascii() or not at.isdigit() or len(at) > 18:
            raise InvalidRequestError(
                f"Last-Event-ID is {text[:100]!r}, expected one from this stream: leave it out to start anew"
            )
        if source in sources:
            found[source] = int(at)
    return found


async def each_line(batches: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, int]]:
    """(a JSON list of the events in a batch, the seq of the last one)."""
    async for lines in batches:
        whole = lines.rstrip(b"\n")
        last = msgspec.json.decode(whole.rpartition(b"\n")[2], type=_Seq)
        yield b"[%b]" % whole.replace(b"\n", b","), last.seq


class _Seq(msgspec.Struct):
    seq: int = 0
