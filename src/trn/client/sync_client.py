"""Client: AsyncClient for code that does not await. One thread with an event loop; no logic of its own."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, Unpack

from trn.client.client import AsyncClient
from trn.client.wire_requests import SubmitOptions
from trn.core.errors import ConflictError
from trn.proto.records import (
    Freed,
    Health,
    JobCheck,
    Lineage,
    LogChunk,
    Machine,
    MetricSeries,
    Pruned,
    Run,
    RunDetails,
    SubmitResult,
)

T = TypeVar("T")


class Client:
    """As AsyncClient, blocking. May be used from any thread, also from one in which an event loop runs; not after a
    fork. Its iterators end their stream when they are closed or dropped."""

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
        """End the connection and the thread. Calls of other threads that still wait are cancelled."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is None or os.getpid() != self._pid:
            return
        asyncio.run_coroutine_threadsafe(self._client.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        assert self._thread is not None
        self._thread.join()

    def submit(
        self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]
    ) -> SubmitResult:
        return self._do(self._client.submit(config, **options))

    def check(self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]) -> JobCheck:
        return self._do(self._client.check(config, **options))

    def resume(
        self,
        run_id: str = "",
        *,
        checkpoint_path: Path | str = "",
        overrides: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | Path | str | None = None,
        base_dir: Path | str | None = None,
        snapshot: str = "",
        frozen_from: Path | str = "",
        code_identity: str = "",
        priority: int = 0,
        force_new: bool = False,
        interpreter: str = "",
        is_import_tried: bool = False,
        log_dir: Path | str = "",
        event_log: Path | str = "",
        is_forced: bool = False,
        submission_id: str = "",
        is_exact: bool = False,
        env: Mapping[str, str] = MappingProxyType({}),
        secret_env: Mapping[str, str] = MappingProxyType({}),
    ) -> SubmitResult:
        return self._do(
            self._client.resume(
                run_id,
                checkpoint_path=checkpoint_path,
                overrides=overrides,
                config=config,
                base_dir=base_dir,
                snapshot=snapshot,
                frozen_from=frozen_from,
                code_identity=code_identity,
                priority=priority,
                force_new=force_new,
                interpreter=interpreter,
                is_import_tried=is_import_tried,
                log_dir=log_dir,
                event_log=event_log,
                is_forced=is_forced,
                submission_id=submission_id,
                is_exact=is_exact,
                env=env,
                secret_env=secret_env,
            )
        )

    def get(self, run_id: str, *, is_exact: bool = False) -> Run:
        return self._do(self._client.get(run_id, is_exact=is_exact))

    def details(self, run_id: str, *, is_exact: bool = False) -> RunDetails:
        return self._do(self._client.details(run_id, is_exact=is_exact))

    def list(
        self,
        *,
        states: Sequence[str] = (),
        name_contains: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
        group: str = "",
        with_config: bool = False,
        page_size: int = 0,
    ) -> Iterator[Run]:
        return self._each(
            self._client.list(
                states=states,
                name_contains=name_contains,
                tags=tags,
                group=group,
                with_config=with_config,
                page_size=page_size,
            )
        )

    def watch(
        self,
        *,
        after_change: int = 0,
        run_ids: Sequence[str] = (),
        is_live_only: bool = False,
        is_exact: bool = False,
    ) -> Iterator[Run]:
        return self._each(
            self._client.watch(
                after_change=after_change, run_ids=run_ids, is_live_only=is_live_only, is_exact=is_exact
            )
        )

    def events(
        self, run_id: str, *, after_seq: int = 0, is_followed: bool = True, is_exact: bool = False
    ) -> Iterator[dict[str, Any]]:
        return self._each(
            self._client.events(run_id, after_seq=after_seq, is_followed=is_followed, is_exact=is_exact)
        )

    def event_lines(
        self, run_id: str, *, after_seq: int = 0, is_followed: bool = True, is_exact: bool = False
    ) -> Iterator[bytes]:
        return self._each(
            self._client.event_lines(run_id, after_seq=after_seq, is_followed=is_followed, is_exact=is_exact)
        )

    def logs(
        self,
        run_id: str,
        *,
        offset: int = 0,
        is_followed: bool = False,
        tail_bytes: int = 0,
        is_exact: bool = False,
    ) -> Iterator[LogChunk]:
        return self._each(
            self._client.logs(
                run_id, offset=offset, is_followed=is_followed, tail_bytes=tail_bytes, is_exact=is_exact
            )
        )

    def metrics(
        self,
        run_id: str,
        names: Sequence[str] = (),
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        is_exact: bool = False,
    ) -> dict[str, MetricSeries]:
        return self._do(
            self._client.metrics(
                run_id,
                names,
                from_step=from_step,
                to_step=to_step,
                max_points=max_points,
                is_exact=is_exact,
            )
        )

    def lineage(
        self, run_id: str, names: Sequence[str] = (), *, max_points: int = 0, is_exact: bool = False
    ) -> Lineage:
        return self._do(self._client.lineage(run_id, names, max_points=max_points, is_exact=is_exact))

    def cancel(self, run_id: str, reason: str = "", *, is_exact: bool = False) -> tuple[Run, bool]:
        return self._do(self._client.cancel(run_id, reason, is_exact=is_exact))

    def remove(self, run_ids: Sequence[str], *, is_dry_run: bool = False) -> tuple[Freed, ...]:
        return self._do(self._client.remove(run_ids, is_dry_run=is_dry_run))

    def prune(
        self,
        *,
        ended_before_ms: int,
        keep_best: int = 0,
        metric: str = "",
        is_max_best: bool = False,
        is_dry_run: bool = False,
    ) -> Pruned:
        return self._do(
            self._client.prune(
                ended_before_ms=ended_before_ms,
                keep_best=keep_best,
                metric=metric,
                is_max_best=is_max_best,
                is_dry_run=is_dry_run,
            )
        )

    def wait(self, run_id: str, timeout_s: float | None = None, *, is_exact: bool = False) -> Run:
        """TimeoutError where it has not ended by then."""

        async def wait() -> Run:
            async with asyncio.timeout(timeout_s):
                return await self._client.wait(run_id, is_exact=is_exact)

        return self._do(wait())

    def devices(self) -> Machine:
        return self._do(self._client.devices())

    def health(self) -> Health:
        return self._do(self._client.health())

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
            future.cancel()  # Ctrl-C: what nobody waits for any more ends
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
                raise ConflictError("this client was made before a fork: make a new one in each process")
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
