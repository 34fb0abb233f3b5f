"""Waits in the loop for changes that the registry's thread commits: many that commit together wake the loop once."""

import asyncio
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class CommitWaiter:
    """Belongs to one loop."""

    def __init__(self) -> None:
        self._done: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._is_woken = False

    async def committed(self, future: "Future[T]") -> T:
        """Its result. A caller that goes away takes nothing back: what was handed in is committed all the same."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def tell(done: "Future[T]") -> None:
            self._done.append((waiter, done))
            if not self._is_woken:
                self._is_woken = True
                loop.call_soon_threadsafe(self._settle)

        future.add_done_callback(tell)
        return await waiter

    def _settle(self) -> None:
        self._is_woken = False  # before the look: what is done from here on wakes again
        while self._done:
            waiter, done = self._done.popleft()
            if waiter.done():
                continue
            fault = done.exception()
            if fault is None:
                waiter.set_result(done.result())
            else:
                waiter.set_exception(fault)
