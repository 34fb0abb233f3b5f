"""What a client gets instead of an answer: a kind, an id, and the faults of its rows. Tracebacks are in the log."""

from collections.abc import Sequence
from typing import Any

import msgspec

from gen_worker.inference.messages import Raised, StreamEnd

RETRY_AFTER_S = 1

STATUS_BY_KIND = {
    "input": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "too_large": 413,
    "media_type": 415,
    "queue_full": 429,
    "error": 500,  # the author's code raised
    "row_count": 500,  # it returned another number of values than rows
    "output": 500,  # what it returned cannot be sent
    "poison": 500,  # the row ends the process that computes it
    "unavailable": 503,
    "deadline": 504,
}


class RowFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wrong in one place of a request. A row is counted from 0."""

    row: int | None = None
    column: str | None = None
    found: str = ""
    expected: str = ""


class Refusal(Exception):  # noqa: N818  (an answer)
    """The answer to a request that gets no predictions."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        faults: Sequence[RowFault] = (),
        retry_after_s: int | None = None,
        error_id: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.faults = tuple(faults)
        self.retry_after_s = retry_after_s
        self.error_id = error_id  # of the log; empty: the request's id

    @property
    def status(self) -> int:
        return STATUS_BY_KIND[self.kind]

    def document(self, request_id: str) -> dict[str, Any]:
        error: dict[str, Any] = {
            "kind": self.kind,
            "id": self.error_id or request_id,
            "message": self.message,
        }
        if self.faults:
            error["faults"] = self.faults
        return {"error": error}


def missed_deadline() -> Refusal:
    return Refusal("deadline", "the deadline of the request has passed")


def unavailable(message: str) -> Refusal:
    return Refusal("unavailable", message, retry_after_s=RETRY_AFTER_S)


def poisoned(rows: Sequence[int], *, error_id: str = "") -> Refusal:
    return Refusal(
        "poison",
        "a row ended the process that computed it; it is not computed again by this version",
        faults=[RowFault(row=row) for row in rows],
        error_id=error_id,
    )


def refuse_raised(raised: Raised) -> Refusal:
    if raised.kind == "input":
        return Refusal("input", raised.words, error_id=raised.error_id)
    message = {
        "error": "the model raised an exception for this row",
        "row_count": "the model did not return one value for each row",
        "output": "the model returned something that cannot be sent",
    }[raised.kind]
    return Refusal(raised.kind, f"{message}; the log has the details", error_id=raised.error_id)


def refuse_stream(end: StreamEnd) -> Refusal | None:
    if not end.kind:
        return None
    if end.kind == "input":
        return Refusal("input", end.words, error_id=end.error_id)
    return Refusal(
        end.kind,
        "the model raised an exception in the stream; the log has the details",
        error_id=end.error_id,
    )
