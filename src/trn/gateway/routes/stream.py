"""`GET /stream`: everything that a page follows, in one connection."""

import asyncio
import codecs
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from trn.core.runs import SERVER
from trn.gateway.daemon_link import GatewayHealth
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.event_stream import (
    MEDIA_TYPE,
    EventStreamResponse,
    Outbox,
    Place,
    Source,
    each_line,
    read_position,
)
from trn.gateway.parts import Parts
from trn.gateway.reading.exactness import Exactness
from trn.gateway.records import HttpRun, show_run
from trn.gateway.routes.runs import find_served
from trn.proto.records import Run
from trn.registry.metrics import MetricReader
from trn.registry.reader import RegistryReader

MAX_FOLLOWED = 16
MAX_REPLAYED_RUNS = 500
MAX_REPLAYED_EVENTS = 20_000
MAX_REPLAYED_LOG = 1 << 20
LOOK_EVERY_S = 1.0
RESET = b'{"reason":"too much has happened since"}'

# RUN, or RUN:NUMBER with the seq or the offset that the client has
Followed = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:\d{1,18})?$")]


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    watch: Literal["", "runs"] = ""
    after_change: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None  # default: from now on
    events: Annotated[list[Followed], msgspec.Meta(max_length=MAX_FOLLOWED)] = []
    log: Annotated[list[Followed], msgspec.Meta(max_length=MAX_FOLLOWED)] = []


@endpoint("GET", "/stream", media_type=MEDIA_TYPE, is_stream=True)
async def stream(parts: Parts, call: Call[StreamQuery]) -> Response:
    """Server-sent events: runs as they change, events and logs of the named runs, the daemon's health.

    `events` and `log` name a run, with `:N` after it the seq or the offset that the client has. `Last-Event-ID` continues a
    stream and wins over the query. Events: `run`, `removed`, `events`, `log`, `end`, `health`, `reset`.
    """
    asked = call.asked
    followed = {f"e:{each.partition(':')[0]}": each for each in asked.events}
    followed |= {f"l:{each.partition(':')[0]}": each for each in asked.log}
    sources: list[Source] = [_Health(parts)]
    names = set(followed)
    if asked.watch:
        sources += [_Runs(parts), _Removed(parts)]
        names |= {"c", "r"}
    for name in followed:
        kind, _, run_id = name.partition(":")
        sources.append(_Events(parts, run_id) if kind == "e" else _Log(parts, run_id))
    now = await _now(parts, names)
    given = {name: int(each.partition(":")[2]) for name, each in followed.items() if ":" in each}
    if asked.watch and asked.after_change is not None:
        given |= {"c": asked.after_change, "r": asked.after_change}
    position = {**now, **given, **read_position(call.headers.get("last-event-id", ""), names)}
    parts.streams.take(call.holder)
    return EventStreamResponse(
        sources,
        position,
        renew=lambda: _now(parts, names),
        stopped=parts.stopped,
        leave=lambda: parts.streams.leave(call.holder),
    )


async def _now(parts: Parts, names: set[str]) -> dict[str, int]:
    """The position of each source now. A run that is not there has 0, and its source says so in the stream: a browser would
    give up for good where the stream itself is refused."""

    def read(reader: RegistryReader) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in sorted(names):
            kind, _, run_id = name.partition(":")
            if kind in ("c", "r"):
                found[name] = reader.last_change()
            elif not reader.has(run_id):
                found[name] = 0
            else:
                found[name] = reader.get(run_id).last_seq if kind == "e" else _log_size(parts, run_id)
        return found

    return await parts.stores.read(read) if names else {}


def _log_size(parts: Parts, run_id: str) -> int:
    try:
        return parts.home.run(run_id).log.lstat().st_size
    except FileNotFoundError:
        return 0


class _Runs:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._trainers: dict[str, str] = {}  # a run's never changes

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:
        after = position["c"]
        missed = await self._parts.stores.read(
            lambda reader: len(reader.changed(after, MAX_REPLAYED_RUNS + 1))
        )
        if missed > MAX_REPLAYED_RUNS:
            await outbox.put("reset", RESET)
            return
        async with aclosing(self._parts.daemon.streams.watch(after_change=after)) as runs:
            async for run in runs:
                data = msgspec.json.encode(await self._show(run))
                await outbox.put("run", data, Place("c", run.change))

    async def _show(self, run: Run) -> HttpRun:
        if run.run_id in self._trainers and run.attempt <= 1:
            trainer = self._trainers[run.run_id]
            exactness = self._parts.exactness.read(run, trainer, None)
        else:
            trainer, exactness = await self._parts.stores.read_both(
                lambda *readers: self._read(run, *readers)
            )
            self._trainers[run.run_id] = trainer
        served = None
        if run.kind == SERVER:
            served = await self._parts.stores.read(lambda reader: find_served(reader, run))
        return show_run(run, trainer, exactness, served=served)

    def _read(
        self, run: Run, registry: RegistryReader, metrics: MetricReader | None
    ) -> tuple[str, Exactness]:
        trainer = registry.trainers([run.run_id]).get(run.run_id, "")
        return trainer, self._parts.exactness.read(run, trainer, metrics)


class _Removed:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:
        after = position["r"]
        while True:
            for run_id, change in await self._read(after):
                await outbox.put("removed", msgspec.json.encode({"run_id": run_id}), Place("r", change))
                after = change
            await asyncio.sleep(LOOK_EVERY_S)

    async def _read(self, after: int) -> list[tuple[str, int]]:
        return await self._parts.stores.read(lambda reader: reader.removed(after))


class _Health:
    """At the start, and when it changes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:  # noqa: ARG002
        said: GatewayHealth | None = None
        while True:
            found = await self._parts.daemon.recent_health()
            is_news = said is None or _without_counts(found) != _without_counts(said)
            if is_news:
                said = found
                await outbox.put("health", msgspec.json.encode(found))
            await asyncio.sleep(LOOK_EVERY_S)


def _without_counts(health: GatewayHealth) -> GatewayHealth:
    return msgspec.structs.replace(health, num_watchers=0, runs_by_state={})


class _Events:
    def __init__(self, parts: Parts, run_id: str) -> None:
        self._parts = parts
        self._run_id = run_id

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:
        name, run_id = f"e:{self._run_id}", msgspec.json.encode(self._run_id)
        after = position[name]
        last = await self._parts.stores.read(lambda reader: reader.get(self._run_id).last_seq)
        if last - after > MAX_REPLAYED_EVENTS:
            await outbox.put("reset", RESET)
            return
        lines = self._parts.daemon.streams.event_lines(self._run_id, after_seq=after, is_exact=True)
        async with aclosing(lines) as batches:
            async for events, seq in each_line(batches):
                await outbox.put("events", b'{"run_id":%b,"events":%b}' % (run_id, events), Place(name, seq))
        await outbox.put("end", b'{"run_id":%b}' % run_id)


class _Log:
    def __init__(self, parts: Parts, run_id: str) -> None:
        self._parts = parts
        self._run_id = run_id

    async def __call__(self, outbox: Outbox, position: Mapping[str, int]) -> None:
        name = f"l:{self._run_id}"
        offset = position[name]
        await self._parts.stores.read(lambda reader: reader.get(self._run_id))
        if (
            await self._parts.stores.run(lambda: _log_size(self._parts, self._run_id)) - offset
            > MAX_REPLAYED_LOG
        ):
            await outbox.put("reset", RESET)
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        logs = self._parts.daemon.streams.logs(self._run_id, offset=offset, is_followed=True, is_exact=True)
        async with aclosing(logs) as chunks:
            async for chunk in chunks:
                text = decoder.decode(chunk.data, final=chunk.is_end)
                end = chunk.offset + len(chunk.data) - len(decoder.getstate()[0])
                if text:
                    data = {"run_id": self._run_id, "offset": offset, "next_offset": end, "text": text}
                    await outbox.put("log", msgspec.json.encode(data), Place(name, end))
                    offset = end


ENDPOINTS = [stream]
