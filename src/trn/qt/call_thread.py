"""Calls to the daemon in a thread of their own. Their results come back to the window's thread."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from PySide6.QtCore import Signal, Slot

from trn.client.client import AsyncClient
from trn.core.errors import TrnError
from trn.qt.loop_thread import LoopThread

CALL_PATIENCE_S = 3.0  # for a daemon that is just being restarted
FOR_EVER_S = 1e9
T = TypeVar("T")


class Ticket:
    """Something that was asked for. After `cancel`, nothing of it comes any more. Belongs to the window's thread."""

    def __init__(self, thread: "CallThread") -> None:
        self.is_cancelled = False
        self._thread = thread
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        self._thread.call_soon(self._cancel_task)

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()


class CallThread(LoopThread):
    """`failed` carries the error of each call that was given no receiver for it, as text."""

    failed = Signal(str)
    _came = Signal(object)

    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home = home
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: AsyncClient | None = None
        self._streams: AsyncClient | None = None
        self._came.connect(self._deliver)

    def ask(
        self,
        call: Callable[[AsyncClient], Awaitable[T]],
        then: Callable[[T], None],
        otherwise: Callable[[Exception], None] | None = None,
    ) -> Ticket:
        """Make the call in this thread; `then` or `otherwise` is called in the window's."""

        async def work() -> None:
            assert self._calls is not None
            value = await call(self._calls)
            self._came.emit((ticket, lambda: then(value)))

        ticket = Ticket(self)
        self.call_soon(lambda: self._begin(ticket, work, otherwise))
        return ticket

    def follow(
        self,
        stream: Callable[[AsyncClient], AsyncGenerator[T, None]],
        each: Callable[[T], None],
        otherwise: Callable[[Exception], None] | None = None,
    ) -> Ticket:
        """As `ask`, for each item of a stream. The next item is fetched when the window has taken this one."""

        async def work() -> None:
            assert self._streams is not None
            async with aclosing(stream(self._streams)) as items:
                async for item in items:
                    is_taken = asyncio.Event()

                    def take(item: T = item, is_taken: asyncio.Event = is_taken) -> None:
                        each(item)
                        self.call_soon(is_taken.set)

                    self._came.emit((ticket, take))
                    await is_taken.wait()

        ticket = Ticket(self)
        self.call_soon(lambda: self._begin(ticket, work, otherwise))
        return ticket

    async def serve(self) -> None:
        async with (
            AsyncClient(self._home, patience_s=CALL_PATIENCE_S) as self._calls,
            AsyncClient(self._home, patience_s=FOR_EVER_S) as self._streams,
        ):
            await asyncio.get_running_loop().create_future()  # until it is stopped

    def _begin(
        self,
        ticket: Ticket,
        work: Callable[[], Awaitable[None]],
        otherwise: Callable[[Exception], None] | None,
    ) -> None:
        if not ticket.is_cancelled:
            ticket.task = asyncio.get_running_loop().create_task(self._guard(ticket, work, otherwise))
            self._tasks.add(ticket.task)
            ticket.task.add_done_callback(self._tasks.discard)

    async def _guard(
        self,
        ticket: Ticket,
        work: Callable[[], Awaitable[None]],
        otherwise: Callable[[Exception], None] | None,
    ) -> None:
        try:
            await work()
        except (TrnError, OSError, ValueError) as fault:
            error: Exception = fault
            if otherwise is None:
                self.failed.emit(str(fault))
            else:
                self._came.emit((ticket, lambda: otherwise(error)))

    @Slot(object)
    def _deliver(self, came: tuple[Ticket, Callable[[], Any]]) -> None:
        ticket, take = came
        if not ticket.is_cancelled:
            take()
