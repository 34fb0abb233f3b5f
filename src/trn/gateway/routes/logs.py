"""The output of a run's worker, of all attempts, bytes as they are; and its events."""

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from starlette.responses import Response

from gen_worker.contract.files.regular import NotRegularFileError, open_regular
from trn.core.errors import NotFoundError, UnavailableError
from trn.gateway.answers import Encoded, json_answer
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.file_answer import FileAnswer
from trn.gateway.parts import Parts
from trn.gateway.reading.event_lines import EventPage, read_events
from trn.gateway.reading.log_search import Found, LogMatch, search_log
from trn.gateway.records import RunId
from trn.registry.reader import RegistryReader

MAX_PIECE = 4 << 20
PLAIN_TEXT = "text/plain"

Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE)] = 65536
    tail: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE)] | None = (
        None  # instead: this many bytes at the end
    )


class LogPath(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId


class LogSearchQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    q: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]  # a text, no pattern
    from_offset: Offset = 0  # the start of a line
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    ignore_case: bool = True


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    after_seq: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000


class LogMatches(msgspec.Struct, frozen=True, kw_only=True):
    matches: list[LogMatch]
    next_offset: int
    is_end: bool


class _Piece(NamedTuple):
    data: bytes
    offset: int
    size: int


@endpoint("GET", "/runs/{run_id}/log", media_type=PLAIN_TEXT)
async def read_log(parts: Parts, call: Call[LogQuery]) -> Response:
    """A piece of the log. The headers `X-Log-Offset` and `X-Log-Size` say where it begins, and how long the log is."""
    asked = call.asked
    path = await _path(parts, asked.run_id)
    piece = await parts.stores.run(lambda: _read(path, asked))
    headers = {"x-log-offset": str(piece.offset), "x-log-size": str(piece.size)}
    return Response(piece.data, media_type=PLAIN_TEXT, headers=headers)


@endpoint("GET", "/runs/{run_id}/logs", media_type=PLAIN_TEXT)
async def read_logs(parts: Parts, call: Call[LogQuery]) -> Response:
    """The same as `/runs/{run_id}/log`: the contract's name of it."""
    return await read_log.handle(parts, call)


def _read(path: Path, asked: LogQuery) -> _Piece:
    fd = _open(path)
    if fd is None:
        return _Piece(b"", 0, 0)
    try:
        size = os.fstat(fd).st_size
        limit = asked.limit if asked.tail is None else asked.tail
        offset = min(asked.offset, size) if asked.tail is None else max(0, size - asked.tail)
        return _Piece(os.pread(fd, limit, offset), offset, size)
    finally:
        os.close(fd)


@endpoint("GET", "/runs/{run_id}/log/search", LogMatches)
async def search_run_log(parts: Parts, call: Call[LogSearchQuery]) -> Response:
    """Lines of the log that have a text. A long log takes several calls: continue at `next_offset` until `is_end`."""
    asked = call.asked

    def search() -> Found:
        fd = _open(path)
        if fd is None:
            return Found([], 0, is_end=True)
        try:
            return search_log(
                fd,
                asked.q.encode(),
                begin=asked.from_offset,
                limit=asked.limit,
                is_case_ignored=asked.ignore_case,
            )
        finally:
            os.close(fd)

    path = await _path(parts, asked.run_id)
    found = await parts.stores.run(search)
    answer = LogMatches(matches=found.matches, next_offset=found.next_offset, is_end=found.is_end)
    return json_answer(answer, call.accept_encoding)


@endpoint("GET", "/runs/{run_id}/log/download", media_type=PLAIN_TEXT)
async def download_log(parts: Parts, call: Call[LogPath]) -> Response:
    """The whole log as a file; ranges are served."""
    path = await _path(parts, call.asked.run_id)
    fd = await parts.stores.run(lambda: _open(path))
    if fd is None:
        raise NotFoundError(f"run {call.asked.run_id} has no log yet")
    return FileAnswer(
        fd,
        size=os.fstat(fd).st_size,
        media_type=f"{PLAIN_TEXT}; charset=utf-8",
        range_header=call.headers.get("range", ""),
        file_name=f"{call.asked.run_id}.log",
    )


@endpoint("GET", "/runs/{run_id}/events", EventPage)
async def list_events(parts: Parts, call: Call[EventsQuery]) -> Response:
    """Events of the run after a seq, as in its events file."""
    asked = call.asked

    def read(reader: RegistryReader) -> Encoded:
        run = reader.get(asked.run_id)
        return Encoded.of(read_events(parts.home, reader, run, asked.after_seq, asked.limit))

    return json_answer(await parts.stores.read(read), call.accept_encoding)


async def _path(parts: Parts, run_id: str) -> Path:
    await parts.stores.read(lambda reader: reader.get(run_id))
    return parts.home.run(run_id).log


def _open(path: Path) -> int | None:
    """None where the worker has not started."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except NotRegularFileError as fault:
        raise UnavailableError(f"the log {path} cannot be read: {fault.strerror}") from fault


ENDPOINTS = [read_log, read_logs, search_run_log, download_log, list_events]
