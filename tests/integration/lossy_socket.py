"""Between a client and a daemon's socket, a way on which replies get lost: the daemon did what it was asked to, and its
client never hears of it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

from trn.core.home import Home, socket_address

_HEAD_BYTES = 9  # of an HTTP/2 frame: length (3), type, flags, stream (4)
_HEADERS = 1  # the type of the frame that a reply begins with


class LossySocket:
    """`home` has a socket that leads to the daemon of another home. The first `num_lost` replies on it are swallowed and
    their connections cut; `on_lost` is told each time. After that it carries everything.
    """

    def __init__(
        self, folder: Path, daemon_home: Home, *, num_lost: int, on_lost: Callable[[], None]
    ) -> None:
        self.home = Home(folder)
        self._daemon_home = daemon_home
        self._num_left = num_lost
        self._on_lost = on_lost

    async def __aenter__(self) -> Self:
        self.home.root.mkdir(parents=True)
        self._stack = contextlib.AsyncExitStack()
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._carriers: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_unix_server(self._accept, socket_address(self.home.socket))
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._server.close()
        for task in self._carriers:
            task.cancel()
        await self._stack.aclose()
        self.home.socket.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._tasks.create_task(self._carry(reader, writer))
        self._carriers.add(task)
        task.add_done_callback(self._carriers.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it or a reply is lost."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(_hang_up, writer)
            try:
                address = socket_address(self._daemon_home.socket)
                replies, requests = await asyncio.open_unix_connection(address)
            except OSError:  # there is no daemon at this moment
                return
            stack.push_async_callback(_hang_up, requests)
            ways = [
                asyncio.create_task(self._carry_requests(reader, requests)),
                asyncio.create_task(self._carry_replies(replies, writer)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _carry_requests(self, reader: asyncio.StreamReader, requests: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            requests.write(data)
            await requests.drain()

    async def _carry_replies(self, replies: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await replies.readexactly(_HEAD_BYTES)
            body = await replies.readexactly(int.from_bytes(head[:3]))
            if head[3] == _HEADERS and self._num_left:
                self._num_left -= 1
                self._on_lost()
                return
            writer.write(head + body)
            await writer.drain()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
