"""Waiting in a loop for what the stores commit."""

import asyncio
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def committed(future: "Future[T]") -> T:
    """Its result. A caller that goes away takes nothing back: what was handed in is committed all the same."""
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def tell(_future: object) -> None:
            # Most commits are settled in the loop's own thread: then there is nobody to be woken.
            if asyncio._get_running_loop() is loop:
                wake()
            else:
                loop.call_soon_threadsafe(wake)

        future.add_done_callback(tell)
        await waiter
    return future.result()
