"""Answers: JSON with words for numbers that JSON does not have, compressed where the client takes it; errors as JSON."""

import logging
import secrets
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from isal import igzip
from starlette.responses import Response

from gen_worker.errors import Fault
from trn.core import errors
from trn.core.errors import TrnError

logger = logging.getLogger("trn.gateway")

MIN_COMPRESSED = 1024
JSON_TYPE = "application/json"

# error -> (status, code); the first that fits
_STATUSES: tuple[tuple[type[TrnError], int, str], ...] = (
    (errors.InfeasibleError, 422, "infeasible"),
    (errors.InvalidRequestError, 400, "invalid"),
    (errors.AmbiguousError, 400, "invalid"),
    (errors.NotFoundError, 404, "not-found"),
    (errors.ConflictError, 409, "conflict"),
    (errors.ForbiddenError, 403, "forbidden"),
    (errors.UnauthenticatedError, 401, "unauthenticated"),
    (errors.TooMuchError, 413, "too-large"),
    (errors.UnavailableError, 503, "unavailable"),
    (errors.RegistryError, 503, "unavailable"),
)


class TooManyError(TrnError):
    """More at once than one caller, or all of them, are given."""

    code = "resource-exhausted"


class RefusedJobError(TrnError):
    """A job that is not valid; `cause` has the faults."""

    def __init__(self, cause: errors.InvalidRequestError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class HttpFault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a job or a request. What does not apply is empty."""

    text: str  # the whole sentence, for people
    path: str = ""  # the field, as dataset.parquet_paths[0]
    kind: str = ""
    found: str = ""
    expected: str = ""
    hint: str = ""

    @classmethod
    def of(cls, fault: str) -> "HttpFault":
        return cls(**Fault.of(fault).to_data())


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What happened. `faults` name each wrong field."""

    code: str
    message: str
    faults: list[HttpFault] = []


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer from status 400 on."""

    error: ErrorBody


class Encoded(NamedTuple):
    """JSON, plain and compressed."""

    plain: bytes
    gzipped: bytes

    @classmethod
    def of(cls, record: Any) -> "Encoded":
        """Blocks for as long as it takes to encode."""
        plain = msgspec.json.encode(record)
        return cls(plain, b"" if len(plain) < MIN_COMPRESSED else igzip.compress(plain, compresslevel=1))


def json_answer(
    record: Any,
    accept_encoding: str = "",
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`record` is encoded now, unless it is `Encoded`."""
    found = record if isinstance(record, Encoded) else Encoded.of(record)
    is_gzipped = bool(found.gzipped) and takes_gzip(accept_encoding)
    more = {"vary": "Accept-Encoding", **(headers or {})}
    if is_gzipped:
        more["content-encoding"] = "gzip"
    return Response(
        found.gzipped if is_gzipped else found.plain, status_code=status, media_type=JSON_TYPE, headers=more
    )


def takes_gzip(accept_encoding: str) -> bool:
    return any(
        part.split(";")[0].strip().lower() == "gzip"
        and not part.replace(" ", "").lower().endswith((";q=0", ";q=0.0"))
        for part in accept_encoding.split(",")
    )


def refusal(
    status: int,
    code: str,
    message: str,
    faults: Iterable[str] = (),
    *,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = ErrorBody(code=code, message=message, faults=[HttpFault.of(fault) for fault in faults])
    return json_answer(ErrorAnswer(error=body), status=status, headers=headers)


def error_answer(fault: Exception, where: str) -> Response:
    """Never a traceback: that is in the log, under the number that the client gets."""
    if isinstance(fault, RefusedJobError):
        code = "infeasible" if isinstance(fault.cause, errors.InfeasibleError) else "invalid"
        return refusal(422, code, fault.cause.reason, fault.cause.faults)
    if isinstance(fault, TooManyError):
        return refusal(429, "too-many", str(fault), headers={"retry-after": "5"})
    for kind, status, code in _STATUSES:
        if isinstance(fault, kind):
            if isinstance(fault, errors.InvalidRequestError):
                return refusal(status, code, fault.reason, fault.faults)
            return refusal(status, code, str(fault))
    if isinstance(fault, sqlite3.Error | OSError):
        logger.warning("%s: %s", where, fault)
        return refusal(503, "unavailable", f"the home cannot be read now: {fault}")
    number = secrets.token_hex(4)
    logger.error("error %s in %s", number, where, exc_info=fault)
    return refusal(500, "internal", f"the gateway failed: error {number}; see `gateway.log` in the home")
