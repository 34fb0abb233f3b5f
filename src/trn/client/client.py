"""AsyncClient: the daemon's API in Python. It reconnects and replays across restarts of the daemon."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, Unpack

import msgspec

from gen_worker.errors import Fault
from trn.client.caller_environment import find_passed
from trn.client.connection import Connection
from trn.client.wire_requests import ResumeOptions, SubmitOptions, make_resume_request, make_submit_request
from trn.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from trn.core.runs import LineagePart
from trn.core.settings import read_settings
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, read_faults, read_refusal, state_number
from trn.proto.records import (
    Artifact,
    ArtifactPage,
    DiscardedPoints,
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

logger = logging.getLogger("trn.client")

# The launcher may have to import torch first, and the author's code may import anything.
LOOK_PATIENCE_S = 300.0


class AsyncClient:
    """A daemon by its home (through its socket), or by address, token and certificate.

    Belongs to one event loop. Opens nothing before the first call. Calls raise TrnErrors; UnavailableError if no daemon
    answers for `patience_s` (0: one try).
    """

    def __init__(
        self,
        home: Path | str | None = None,
        *,
        address: str = "",
        token: str = "",
        ca_certificate: Path | str = "",
        is_insecure: bool = False,
        patience_s: float = 60.0,
        timeout_s: float = 30.0,
    ) -> None:
        self._connection = Connection(
            home,
            address=address,
            token=token,
            ca_certificate=ca_certificate,
            is_insecure=is_insecure,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )

    @property
    def patience_s(self) -> float:
        """For calls and streams that start from now on."""
        return self._connection.patience_s

    @patience_s.setter
    def patience_s(self, patience_s: float) -> None:
        self._connection.patience_s = patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end the streams of this client."""
        await self._connection.close()

    async def submit(
        self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]
    ) -> SubmitResult:
        """Queue a run; durable when it returns. `config` is a job or its file, `options` are `SubmitOptions`.

        An equal run that is alive or complete is returned instead; `existed` and the first of `notes` say so.
        """
        return await self._submit("SubmitRun", await self._make_request(config, options))

    async def check(
        self, config: Mapping[str, Any] | Path | str, **options: Unpack[SubmitOptions]
    ) -> JobCheck:
        """Check a job as `submit` would, with every fault as data. Queues nothing."""
        request = await self._make_request(config, options)
        timeout_s = LOOK_PATIENCE_S if request.is_import_tried else None
        answer = await self._connection.call("CheckRun", request, timeout_s=timeout_s)
        check = from_message(answer, JobCheck)
        faults = read_faults(answer.refusal) or map(Fault, check.faults)  # an older daemon has texts alone
        return msgspec.structs.replace(check, faults=tuple(faults))

    async def resume(self, run_id: str = "", **options: Unpack[ResumeOptions]) -> SubmitResult:
        """A new run that continues an ended one, or a checkpoint with a `config`: see `ResumeOptions`.

        It is the next run of the family, unless `overrides` give it a `run_id`. An equal run answers, as for `submit`.
        Secret variables of the old run are given to the new one while the daemon still has their values.
        """
        passed = find_passed(self._pass_env())
        if options.get("config") is None and passed:  # the old run's own variables come before the settings
            own = ((await self.get(run_id)).config or {}).get("env") or {}
            passed = {name: value for name, value in passed.items() if name not in own}
        frozen: ResumeOptions = {**options, **await self._freeze(options)}
        return await self._submit("ResumeRun", make_resume_request(run_id, frozen, passed=passed))

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

    async def watch(
        self,
        *,
        after_change: int = 0,
        run_ids: Sequence[str] = (),
        is_live_only: bool = False,
        is_exact: bool = False,
    ) -> AsyncGenerator[Run, None]:
        """Runs as they change, first those that changed after `after_change`. Endless. Fast changes are merged: the
        newest state of a run always comes, but not every state in between."""
        change, is_new = after_change, True
        if not is_exact:
            run_ids = [await self._pin(run_id) for run_id in run_ids]

        def request() -> pb.WatchRunsRequest:
            return pb.WatchRunsRequest(
                after_change=change, run_ids=run_ids, live_only=is_live_only and is_new, is_exact=True
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
        names: Sequence[str] = (),
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        is_exact: bool = False,
    ) -> dict[str, MetricSeries]:
        """A run's metric points by name, reduced to `max_points` of each if given."""
        asked = _MetricsAsked(run_id, names, from_step, to_step, max_points, is_exact)
        return _by_name(await self._connection.call("GetMetrics", asked.request()))

    async def discarded(
        self,
        run_id: str,
        names: Sequence[str] = (),
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 1000,
        is_exact: bool = False,
    ) -> tuple[DiscardedPoints, ...]:
        """Metric points that later attempts took back, by name and attempt, reduced to `max_points` of each."""
        asked = _MetricsAsked(run_id, names, from_step, to_step, max_points, is_exact)
        answer = await self._connection.call("GetMetrics", asked.request(with_discarded=True))
        return tuple(from_message(part, DiscardedPoints) for part in answer.discarded)

    async def lineage(
        self, run_id: str, names: Sequence[str] = (), *, max_points: int = 0, is_exact: bool = False
    ) -> Lineage:
        """A run and those that it was resumed from, as one curve."""
        asked = _MetricsAsked(run_id, names, None, None, max_points, is_exact)
        answer = await self._connection.call("GetMetrics", asked.request(with_ancestors=True))
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

    async def cancel(self, run_id: str, reason: str = "", *, is_exact: bool = False) -> tuple[Run, bool]:
        """Cancel a run; recorded when this returns. (the run, whether it was still live)."""
        answer = await self._connection.call(
            "CancelRun", pb.CancelRunRequest(run_id=run_id, reason=reason, is_exact=is_exact)
        )
        return from_message(answer.run, Run), answer.was_live

    async def remove(
        self, run_ids: Sequence[str], *, is_dry_run: bool = False, is_exact: bool = False
    ) -> tuple[Freed, ...]:
        """Remove ended runs with their folders and metrics: all of them, or none and a ConflictError."""
        pinned = list(run_ids) if is_exact else []
        for run_id in () if is_exact else run_ids:
            try:
                pinned.append(await self._pin(run_id))
            except NotFoundError:
                pinned.append(run_id)  # perhaps it was already removed: the daemon knows
        request = pb.RemoveRunsRequest(run_ids=pinned, is_dry_run=is_dry_run, is_exact=True)
        answer = await self._connection.call("RemoveRuns", request, timeout_s=LOOK_PATIENCE_S)
        return from_message(answer, Pruned).freed

    async def prune(
        self,
        *,
        ended_before_ms: int,
        keep_best: int = 0,
        metric: str = "",
        is_max_best: bool = False,
        is_dry_run: bool = False,
    ) -> Pruned:
        """Remove runs that ended before then and are not needed, superseded checkpoints, code and caches."""
        request = pb.PruneRequest(
            ended_before_ms=ended_before_ms,
            keep_best=keep_best,
            metric=metric,
            is_max_best=is_max_best,
            is_dry_run=is_dry_run,
        )
        answer = await self._connection.call("Prune", request, timeout_s=LOOK_PATIENCE_S)
        return from_message(answer, Pruned)

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

    async def devices(self) -> Machine:
        """The resources of the daemon's machine."""
        answer = await self._connection.call("ListDevices", pb.ListDevicesRequest())
        return from_message(answer, Machine)

    async def health(self) -> Health:
        """The state of the daemon."""
        answer = await self._connection.call("GetHealth", pb.GetHealthRequest())
        return from_message(answer, Health)

    async def _make_request(
        self, config: Mapping[str, Any] | Path | str, options: SubmitOptions
    ) -> pb.Submission:
        frozen: SubmitOptions = {**options, **await self._freeze(options)}
        return make_submit_request(config, frozen, pass_env=self._pass_env())

    def _pass_env(self) -> Sequence[str]:
        """`pass_env` of the settings, if this client has the home."""
        home = self._connection.home
        return [] if home is None else read_settings(home.settings).pass_env

    async def _freeze(self, options: SubmitOptions) -> SubmitOptions:
        """The snapshot of `code_dir`, where that is given."""
        folder, home = options.get("code_dir"), self._connection.home
        if folder is None:
            return {}
        if home is None:
            raise InvalidRequestError(
                "code_dir needs the daemon's home on this machine, and this client knows only its address"
            )
        from trn.client.code.snapshot import take_snapshot

        max_bytes = read_settings(home.settings).max_snapshot_bytes
        taken = await asyncio.to_thread(take_snapshot, Path(folder), home, max_bytes=max_bytes)
        return {"snapshot": taken.digest, "frozen_from": taken.folder}

    async def _pin(self, run_id: str) -> str:
        """The id of the run now: a stream that is reopened must not continue with a newer one."""
        return (await self.get(run_id)).run_id

    async def _submit(self, name: str, request: Any) -> SubmitResult:
        timeout_s = LOOK_PATIENCE_S if name == "ResumeRun" or request.is_import_tried else None
        answer = await self._connection.call(name, request, timeout_s=timeout_s)
        if answer.HasField("refusal"):
            raise read_refusal(answer.refusal)
        return from_message(answer, SubmitResult)


class _MetricsAsked(NamedTuple):
    run_id: str
    names: Sequence[str]
    from_step: int | None
    to_step: int | None
    max_points: int
    is_exact: bool

    def request(self, **more: Any) -> pb.GetMetricsRequest:
        return pb.GetMetricsRequest(**self._asdict(), **more)


def _by_name(answer: pb.GetMetricsResponse) -> dict[str, MetricSeries]:
    return {series.name: from_message(series, MetricSeries) for series in answer.series}
