"""Client: AsyncClient for code without `await`; runs it in a thread with an event loop."""

import asyncio
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from trn.client.client import AsyncClient
from trn.core.errors import ConflictError
from trn.proto.records import Run

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    call: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """The same call, with its options and its docstring, that blocks until the answer is there."""

    @functools.wraps(call)
    def blocking(client: "Client", /, *args: P.args, **options: P.kwargs) -> T:
        return client._do(call(client._client, *args, **options))

    return blocking


def _iterating(
    call: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Iterator[T]]:
    """The same call as a plain iterator."""

    @functools.wraps(call)
    def iterating(client: "Client", /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        return client._each(call(client._client, *args, **options))

    return iterating


class Client:
    """As AsyncClient, blocking. May be used from any thread, even with a running event loop; not after a fork. Its
    iterators end their stream when they are closed or dropped."""

    def __init__(self, home: Path | str | None = None, **connection: Any) -> None:
        self._client = AsyncClient(home, **connection)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def patience_s(self) -> float:
        return self._client.patience_s

    @patience_s.setter
    def patience_s(self, patience_s: float) -> None:
        self._client.patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread. Cancels waiting calls of other threads."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is None or os.getpid() != self._pid:
            return
        asyncio.run_coroutine_threadsafe(self._client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        assert self._thread is not None
        self._thread.join()

    submit = _blocking(AsyncClient.submit)
    check = _blocking(AsyncClient.check)
    resume = _blocking(AsyncClient.resume)
    get = _blocking(AsyncClient.get)
    details = _blocking(AsyncClient.details)
    metrics = _blocking(AsyncClient.metrics)
    discarded = _blocking(AsyncClient.discarded)
    lineage = _blocking(AsyncClient.lineage)
    cancel = _blocking(AsyncClient.cancel)
    update = _blocking(AsyncClient.update)
    remove = _blocking(AsyncClient.remove)
    prune = _blocking(AsyncClient.prune)
    promote = _blocking(AsyncClient.promote)
    rollback = _blocking(AsyncClient.rollback)
    wait_promotion = _blocking(AsyncClient.wait_promotion)
    served = _blocking(AsyncClient.served)
    get_served = _blocking(AsyncClient.get_served)
    make_promote_token = _blocking(AsyncClient.make_promote_token)
    devices = _blocking(AsyncClient.devices)
    health = _blocking(AsyncClient.health)
    list = _iterating(AsyncClient.list)
    watch = _iterating(AsyncClient.watch)
    events = _iterating(AsyncClient.events)
    event_lines = _iterating(AsyncClient.event_lines)
    logs = _iterating(AsyncClient.logs)
    artifacts = _iterating(AsyncClient.artifacts)
    read_artifact = _iterating(AsyncClient.read_artifact)

    def wait(self, run_id: str, timeout_s: float | None = None, *, is_exact: bool = False) -> Run:
        """TimeoutError if it has not ended by then."""

        async def wait() -> Run:
            async with asyncio.timeout(timeout_s):
                return await self._client.wait(run_id, is_exact=is_exact)

        return self._do(wait())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            loop = self._running_loop()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C
            raise

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        async def take() -> tuple[T] | None:
            try:
                return (await anext(items),)
            except StopAsyncIteration:
                return None

        async def stop() -> None:
            await items.aclose()

        try:
            while (item := self._do(take())) is not None:
                yield item[0]
        finally:
            if not self._is_closed:
                self._do(stop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if os.getpid() != self._pid:
                raise ConflictError("this client was created before a fork: create a new one in each process")
            if self._is_closed:
                raise ConflictError("this client is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="trn-client", daemon=True
                )
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
