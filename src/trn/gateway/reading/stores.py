"""The registry and the metric points, read-only, in threads of their own; also while no daemon runs.

Answers are cached by the version of what they are made of, such as the registry's change counter: a hundred readers cost one read.
"""

import asyncio
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trn.core.home import Home
from trn.gateway.answers import Encoded
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

NUM_THREADS = 4
MAX_CACHED = 256
MAX_CACHED_BYTES = 32 << 20

T = TypeVar("T")


class _Cached(NamedTuple):
    version: Hashable
    answer: Encoded


class Stores:
    """Its coroutines belong to the loop's thread; what they are given runs in a thread that has its own connections."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="read")
        self._own = threading.local()
        self._stamp = secrets.token_hex(4)  # another process may encode in another way
        self._cache: OrderedDict[Hashable, _Cached] = OrderedDict()
        self._cached_bytes = 0
        self._making: dict[Hashable, asyncio.Future[Encoded]] = {}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, do: Callable[[RegistryReader], T]) -> T:
        """`do` with a reader of the registry. NotFoundError where there is none yet."""
        return await self._run(lambda: do(self._open("registry", self._home.registry, RegistryReader)))

    async def read_metrics(self, do: Callable[[MetricReader | None], T]) -> T:
        """`do` with a reader of the metric points, None where no run has reported any yet."""

        def run() -> T:
            path = self._home.metrics
            return do(self._open("metrics", path, MetricReader) if path.exists() else None)

        return await self._run(run)

    async def read_both(self, do: Callable[[RegistryReader, MetricReader | None], T]) -> T:
        def run() -> T:
            path = self._home.metrics
            metrics = self._open("metrics", path, MetricReader) if path.exists() else None
            return do(self._open("registry", self._home.registry, RegistryReader), metrics)

        return await self._run(run)

    async def run(self, do: Callable[[], T]) -> T:
        """Something else that blocks: files."""
        return await self._run(do)

    async def last_change(self) -> int:
        return await self.read(lambda reader: reader.last_change())

    def tag(self, *version: int) -> str:
        """An ETag for what is made of the stores at that version."""
        return f'W/"{"-".join([self._stamp, *map(str, version)])}"'

    async def cached(
        self, key: Hashable, version: Hashable, make: Callable[[RegistryReader, MetricReader | None], Any]
    ) -> Encoded:
        """The answer for `key` at that version, made at most once; `make` returns a record."""
        found = self._cache.get(key)
        if found is not None and found.version == version:
            self._cache.move_to_end(key)
            return found.answer
        return await self._once((key, version), lambda: self._make(key, version, make))

    async def _make(
        self, key: Hashable, version: Hashable, make: Callable[[RegistryReader, MetricReader | None], Any]
    ) -> Encoded:
        answer = await self.read_both(lambda registry, metrics: Encoded.of(make(registry, metrics)))
        self._forget(key)
        self._cache[key] = _Cached(version, answer)
        self._cached_bytes += _size(answer)
        while len(self._cache) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES:
            self._forget(next(iter(self._cache)))
        return answer

    def _forget(self, key: Hashable) -> None:
        found = self._cache.pop(key, None)
        if found is not None:
            self._cached_bytes -= _size(found.answer)

    async def _once(self, key: Hashable, make: Callable[[], Awaitable[Encoded]]) -> Encoded:
        """Callers that wait for the same share it."""
        waiting = self._making.get(key)
        if waiting is not None:
            return await asyncio.shield(waiting)
        task = asyncio.ensure_future(make())
        self._making[key] = task
        task.add_done_callback(
            lambda done: (self._making.pop(key, None), done.cancelled() or done.exception())
        )
        return await asyncio.shield(task)

    async def _run(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def _open(self, name: str, path: Path, kind: Callable[[Path], T]) -> T:
        """This thread's reader. A file that was replaced is opened anew."""
        try:
            stat = os.stat(path)  # noqa: PTH116  (hot)
            place = stat.st_dev, stat.st_ino
        except FileNotFoundError:
            place = 0, 0
        known = getattr(self._own, name, None)
        if known is not None and known[0] == place:
            return known[1]  # type: ignore[no-any-return]
        if known is not None:
            known[1].close()
            delattr(self._own, name)
        reader = kind(path)
        setattr(self._own, name, (place, reader))
        return reader


def _size(answer: Encoded) -> int:
    return len(answer.plain) + len(answer.gzipped)
