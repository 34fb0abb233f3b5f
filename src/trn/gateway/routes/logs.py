"""The output of a run's worker, of all attempts: bytes as they are."""

import os
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from starlette.responses import Response

from gen_worker.contract.files.regular import NotRegularFileError, open_regular
from trn.core.errors import UnavailableError
from trn.gateway.endpoints import Call, endpoint
from trn.gateway.parts import Parts
from trn.gateway.records import RunId

MAX_PIECE = 4 << 20
PLAIN_TEXT = "text/plain"

Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_id: RunId
    offset: Offset = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE)] = 65536
    tail: Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECE)] | None = None  # instead: the last so many bytes


class _Piece(NamedTuple):
    data: bytes
    offset: int
    size: int


@endpoint("GET", "/runs/{run_id}/log", media_type=PLAIN_TEXT)
async def read_log(parts: Parts, call: Call[LogQuery]) -> Response:
    """A piece of the log. The headers `X-Log-Offset` and `X-Log-Size` say where it begins, and how long the log is."""
    asked = call.asked
    await parts.stores.read(lambda reader: reader.get(asked.run_id))
    path = parts.home.run(asked.run_id).log
    piece = await parts.stores.run(lambda: _read(path, asked))
    headers = {"x-log-offset": str(piece.offset), "x-log-size": str(piece.size)}
    return Response(piece.data, media_type=PLAIN_TEXT, headers=headers)


def _read(path: Path, asked: LogQuery) -> _Piece:
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            limit = asked.limit if asked.tail is None else asked.tail
            offset = min(asked.offset, size) if asked.tail is None else max(0, size - asked.tail)
            return _Piece(os.pread(file.fileno(), limit, offset), offset, size)
    except FileNotFoundError:
        return _Piece(b"", 0, 0)  # the worker has not started
    except NotRegularFileError as fault:
        raise UnavailableError(f"the log {path} cannot be read: {fault.strerror}") from fault


ENDPOINTS = [read_log]
