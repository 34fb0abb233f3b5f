"""What a client reads: runs, their events, logs, metrics and files. Streams continue after their last item."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from trn.client.connection import Connection
from trn.core.errors import UnavailableError
from trn.core.runs import LineagePart
from trn.core.serving.records import ServedModel
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, state_number
from trn.proto.records import (
    Artifact,
    ArtifactPage,
    DiscardedPoints,
    Lineage,
    LogChunk,
    MetricSeries,
    Run,
    RunDetails,
    ServedDetails,
)

logger = logging.getLogger("trn.client")


class RunReader:
    """The calls of `AsyncClient` that change nothing."""

    _connection: Connection

    async def get(self, run_id: str, *, is_exact: bool = False) -> Run:
        """By id or unique prefix, with its config. The name of a family means its newest run, `family.1` its first. With
        `is_exact`, here and in all other calls, only the run of that very id."""
        return (await self.details(run_id, is_exact=is_exact)).run

    async def details(self, run_id: str, *, is_exact: bool = False) -> RunDetails:
        """The run with its attempts and its folder."""
        request = pb.GetRunRequest(run_id=run_id, is_exact=is_exact)
        answer = await self._connection.call("GetRun", request)
        return from_message(answer, RunDetails)

    async def list(
        self,
        *,
        states: Sequence[str] = (),
        name_contains: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
        group: str = "",
        with_config: bool = False,
        page_size: int = 0,
    ) -> AsyncGenerator[Run, None]:
        """Runs, newest first; fetched page by page."""
        token = ""
        while True:
            request = pb.ListRunsRequest(
                states=[state_number(state) for state in states],  # type: ignore[misc]
                name_contains=name_contains,
                tags=dict(tags),
                group=group,
                page_size=page_size,
                page_token=token,
                with_config=with_config,
            )
            answer = await self._connection.call("ListRuns", request)
            for run in answer.runs:
                yield from_message(run, Run)
            token = answer.next_page_token
            if not token:
                return

    async def served(self) -> tuple[ServedModel, ...]:
        """The served names, and what they answer with."""
        answer = await self._connection.call("ListServed", pb.ListServedRequest())
        return tuple(from_message(item, ServedModel) for item in answer.served)

    async def get_served(self, name: str, *, limit: int = 0) -> ServedDetails:
        """A served name, or the one of that server's run, and its promotions, the newest first."""
        answer = await self._connection.call("GetServed", pb.GetServedRequest(name=name, limit=limit))
        return from_message(answer, ServedDetails)

    async def watch(
        self,
        *,
        after_change: int = 0,
        run_ids: str | Sequence[str] = (),
        is_live_only: bool = False,
        is_exact: bool = False,
    ) -> AsyncGenerator[Run, None]:
        """Runs as they change, first those that changed after `after_change`. Endless. Fast changes are merged: the
        newest state of a run always comes, but not every state in between."""
        change, is_new = after_change, True
        watched = as_names(run_ids)
        if not is_exact:
            watched = [await self._pin(run_id) for run_id in watched]

        def request() -> pb.WatchRunsRequest:
            return pb.WatchRunsRequest(
                after_change=change, run_ids=watched, live_only=is_live_only and is_new, is_exact=True
            )

        async with aclosing(
            self._connection.stream("WatchRuns", request, is_end=lambda _answer: False)
        ) as answers:
            async for answer in answers:
                is_new = False
                if answer.HasField("fell_behind"):
                    logger.info("this watch fell behind; it continues from the registry")
                for run in answer.runs:
                    yield from_message(run, Run)
                change = max(change, answer.change)
        raise UnavailableError("the daemon ended the watch")

    async def events(
        self, run_id: str, *, after_seq: int = 0, is_followed: bool = True, is_exact: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A run's events in order, each exactly once; followed until the run has ended."""
        async with aclosing(
            self.event_lines(run_id, after_seq=after_seq, is_followed=is_followed, is_exact=is_exact)
        ) as batches:
            async for lines in batches:
                for line in lines.splitlines():
                    yield msgspec.json.decode(line)

    async def event_lines(
        self, run_id: str, *, after_seq: int = 0, is_followed: bool = True, is_exact: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """As `events`, as JSON lines, several at a time."""
        seq = after_seq
        run_id = run_id if is_exact else await self._pin(run_id)

        def request() -> pb.StreamEventsRequest:
            return pb.StreamEventsRequest(run_id=run_id, after_seq=seq, follow=is_followed, is_exact=True)

        async with aclosing(
            self._connection.stream("StreamEvents", request, is_end=lambda answer: answer.is_end)
        ) as answers:
            async for answer in answers:
                if answer.HasField("fell_behind"):
                    logger.warning(
                        "events of %s came faster than they were read; continuing from its file", run_id
                    )
                if answer.last_seq <= seq:
                    continue
                if answer.first_seq != seq + 1:
                    logger.warning("events of %s: %d came after %d", run_id, answer.first_seq, seq)
                seq = answer.last_seq
                yield answer.lines

    async def logs(
        self,
        run_id: str,
        *,
        offset: int = 0,
        is_followed: bool = False,
        tail_bytes: int = 0,
        is_exact: bool = False,
    ) -> AsyncGenerator[LogChunk, None]:
        """Bytes of a run's log from `offset`, or its last `tail_bytes`; the last chunk has `is_end`."""
        at, tail = offset, tail_bytes
        run_id = run_id if is_exact else await self._pin(run_id)

        def request() -> pb.StreamLogsRequest:
            return pb.StreamLogsRequest(
                run_id=run_id, offset=at, follow=is_followed, tail_bytes=tail, is_exact=True
            )

        async with aclosing(
            self._connection.stream("StreamLogs", request, is_end=lambda answer: answer.is_end)
        ) as answers:
            async for answer in answers:
                at, tail = answer.offset + len(answer.data), 0
                yield from_message(answer, LogChunk)

    async def metrics(
        self,
        run_id: str,
        names: str | Sequence[str] = (),
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        is_exact: bool = False,
    ) -> dict[str, MetricSeries]:
        """A run's metric points by name, reduced to `max_points` of each if given."""
        request = _MetricsRequest(run_id, as_names(names), from_step, to_step, max_points, is_exact)
        return _by_name(await self._connection.call("GetMetrics", request.as_message()))

    async def discarded(
        self,
        run_id: str,
        names: str | Sequence[str] = (),
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 1000,
        is_exact: bool = False,
    ) -> tuple[DiscardedPoints, ...]:
        """Metric points that later attempts took back, by name and attempt, reduced to `max_points` of each."""
        request = _MetricsRequest(run_id, as_names(names), from_step, to_step, max_points, is_exact)
        answer = await self._connection.call("GetMetrics", request.as_message(with_discarded=True))
        return tuple(from_message(part, DiscardedPoints) for part in answer.discarded)

    async def lineage(
        self, run_id: str, names: str | Sequence[str] = (), *, max_points: int = 0, is_exact: bool = False
    ) -> Lineage:
        """A run and those that it was resumed from, as one curve."""
        request = _MetricsRequest(run_id, as_names(names), None, None, max_points, is_exact)
        answer = await self._connection.call("GetMetrics", request.as_message(with_ancestors=True))
        parts = tuple(from_message(part, LineagePart) for part in answer.lineage)
        return Lineage(parts=parts, metrics=_by_name(answer))

    async def artifacts(
        self, run_id: str, *, kind: str = "", page_size: int = 0, is_exact: bool = False
    ) -> AsyncGenerator[Artifact, None]:
        """The files that a run's events named, newest first; fetched page by page. `kind`: checkpoint, sample, video or
        file."""
        token = ""
        run_id = run_id if is_exact else await self._pin(run_id)
        while True:
            request = pb.ListArtifactsRequest(
                run_id=run_id, kind=kind, page_size=page_size, page_token=token, is_exact=True
            )
            page = from_message(await self._connection.call("ListArtifacts", request), ArtifactPage)
            for artifact in page.artifacts:
                yield artifact
            token = page.next_page_token
            if not token:
                return

    async def read_artifact(
        self, artifact_id: str, offset: int = 0, length: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """Its bytes from `offset` on, `length` of them or all, in pieces. ConflictError if the file is not the recorded one
        any more; then what came before must not be used."""
        at, end = offset, offset + length if length else None

        def request() -> pb.ReadArtifactRequest:
            rest = 0 if end is None else end - at
            return pb.ReadArtifactRequest(artifact_id=artifact_id, offset=at, length=rest)

        async with aclosing(
            self._connection.stream("ReadArtifact", request, is_end=lambda answer: answer.is_end)
        ) as answers:
            async for answer in answers:
                if answer.data:
                    at = answer.offset + len(answer.data)
                    yield answer.data
                if end is not None and at >= end:
                    return

    async def wait(self, run_id: str, *, is_exact: bool = False) -> Run:
        """The run, once it has ended. Use `asyncio.timeout` for a limit."""
        run = await self.get(run_id, is_exact=is_exact)
        if run.is_terminal:
            return run
        async with aclosing(
            self.watch(after_change=run.change, run_ids=[run.run_id], is_exact=True)
        ) as changes:
            async for run in changes:
                if run.is_terminal:
                    return run
        raise AssertionError("a watch does not end")

    async def _pin(self, run_id: str) -> str:
        """The id of the run now: a stream that is reopened must not continue with a newer one."""
        return (await self.get(run_id)).run_id


class _MetricsRequest(NamedTuple):
    run_id: str
    names: Sequence[str]
    from_step: int | None
    to_step: int | None
    max_points: int
    is_exact: bool

    def as_message(self, **more: Any) -> pb.GetMetricsRequest:
        return pb.GetMetricsRequest(**self._asdict(), **more)


def as_names(given: str | Sequence[str]) -> list[str]:
    """One name is one, not its letters."""
    return [given] if isinstance(given, str) else list(given)


def _by_name(answer: pb.GetMetricsResponse) -> dict[str, MetricSeries]:
    return {series.name: from_message(series, MetricSeries) for series in answer.series}
