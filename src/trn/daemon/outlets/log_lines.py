"""The lines of the logs: what each is made of, and how it is known again.

A line is a function of its source: a run's events file, its worker.log, its record. Only the time of an output line is
not, and that comes last. So what is in a log already can be told from what is still to be written, and a line of which
only the beginning was written is completed byte for byte.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from trn.core.number_words import as_word
from trn.core.runs import RunRecord

OUTPUT_VERSION = "trainer_log.v1"
JOB_VERSION = "trainer_job.v1"
MAX_MESSAGE_BYTES = 16 << 10  # of an output line; a longer one is cut
NUM_JOB_LINES = 2

_TIME = b'"timestamp_ms":'
_IS_TIME_BEGUN = re.compile(rb"(\d{0,13})(\}?)\Z")
_encode = msgspec.json.encode


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a worker printed, or a part of one that was too long."""

    schema_version: str = OUTPUT_VERSION
    event: str = "output"
    run_id: str
    attempt: int
    offset: int  # in worker.log
    size_bytes: int  # there, with its newline
    is_partial: bool  # the next one goes on with it
    message: str
    nonce: str | msgspec.UnsetType = msgspec.UNSET  # of the submission; runs from before have none
    timestamp_ms: int  # when it was copied


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A run was accepted. Nothing in it ever changes."""

    schema_version: str = JOB_VERSION
    event: str = "job_submitted"
    run_id: str
    state: str = "PENDING"
    name: str
    priority: int
    parent_run_id: str
    digest: str
    tags: dict[str, str]
    folder: str
    submitted_ms: int
    nonce: str | msgspec.UnsetType = msgspec.UNSET
    timestamp_ms: int


class JobEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A run has ended for good."""

    schema_version: str = JOB_VERSION
    event: str  # job_completed, job_failed, job_cancelled
    run_id: str
    state: str
    name: str
    reason: str
    attempt: int
    step: int
    end_step: int | None
    metrics: dict[str, float | str]  # the words nan, inf and -inf where it is no number
    devices: tuple[str, ...]
    parent_run_id: str
    digest: str
    tags: dict[str, str]
    folder: str
    final_checkpoint: str
    submitted_ms: int
    ended_ms: int
    stop_reason: str
    nonce: str | msgspec.UnsetType = msgspec.UNSET
    timestamp_ms: int


def job_submitted(run: RunRecord, folder: str) -> bytes:
    line = JobSubmitted(
        run_id=run.run_id,
        name=run.name,
        priority=run.priority,
        parent_run_id=run.parent_run_id,
        digest=run.digest,
        tags=run.tags,
        folder=folder,
        submitted_ms=run.submitted_ms,
        nonce=run.nonce or msgspec.UNSET,
        timestamp_ms=run.submitted_ms,
    )
    return _encode(line) + b"\n"


def job_ended(run: RunRecord, folder: str, final_checkpoint: str) -> bytes:
    ended_ms = run.ended_ms or run.updated_ms
    line = JobEnded(
        event=f"job_{run.state.lower()}",
        run_id=run.run_id,
        state=run.state,
        name=run.name,
        reason=run.reason,
        attempt=run.attempt,
        step=run.step,
        end_step=run.end_step,
        metrics={name: as_word(value) for name, value in run.metrics.items()},
        devices=run.devices,
        parent_run_id=run.parent_run_id,
        digest=run.digest,
        tags=run.tags,
        folder=folder,
        final_checkpoint=final_checkpoint,
        submitted_ms=run.submitted_ms,
        ended_ms=ended_ms,
        stop_reason=run.stop_reason,
        nonce=run.nonce or msgspec.UNSET,
        timestamp_ms=ended_ms,
    )
    return _encode(line) + b"\n"


class AttemptStart(NamedTuple):
    """Where in worker.log the output of an attempt begins."""

    offset: int
    number: int


def cut_output(
    data: bytes, offset: int, *, is_all: bool, starts: Sequence[AttemptStart] = ()
) -> Iterator[tuple[int, int, int, bool, str]]:
    """(attempt, offset, size, is partial, text) of the lines in bytes of a worker.log that begin at `offset`.

    A line ends with its newline, where another attempt begins, or, with `is_all`, where the bytes end. What is not
    ended yet is left for later. How it is cut depends on nothing but what is in the file.
    """
    at = 0
    while at < len(data):
        number, end = _attempt_at(starts, offset + at)
        limit = len(data) if end is None else min(len(data), end - offset)
        newline = data.find(b"\n", at, min(limit, at + MAX_MESSAGE_BYTES + 1))
        is_partial = False
        if newline >= 0:
            stop = newline + 1
        elif limit - at > MAX_MESSAGE_BYTES:
            stop, is_partial = _between_letters(data, at + MAX_MESSAGE_BYTES), True
        elif end is not None and limit == end - offset:
            stop = limit
        elif is_all:
            stop = len(data)
        else:
            return
        text = data[at:stop].removesuffix(b"\n").decode("utf-8", "backslashreplace")
        yield number, offset + at, stop - at, is_partial, text
        at = stop


def _attempt_at(starts: Sequence[AttemptStart], offset: int) -> tuple[int, int | None]:
    """(the attempt that printed there, where the next one begins)."""
    number = starts[0].number if starts else 1
    for start in starts:
        if start.offset > offset:
            return number, start.offset
        number = start.number
    return number, None


def _between_letters(data: bytes, at: int) -> int:
    """At or a little before there: not inside of a letter of several bytes."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at  # it is no UTF-8


class Mark(NamedTuple):
    """What a line in a log is a copy of."""

    run_id: str
    kind: str  # event, output, job
    value: int  # the event's number; where the output ends; which of the job's lines
    nonce: str = ""  # of the submission: a later run may have the same id


class _Head(msgspec.Struct):
    run_id: str
    event: str
    schema_version: str = ""
    seq: int = 0
    nonce: str = ""


class _OutputHead(msgspec.Struct):
    offset: int
    size_bytes: int


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_output = msgspec.json.Decoder(_OutputHead).decode


def read_mark(line: bytes) -> Mark | None:
    """None: it is none of ours."""
    try:
        head = _decode_head(line)
        if head.schema_version == JOB_VERSION:
            return Mark(head.run_id, "job", 1 if head.event == "job_submitted" else NUM_JOB_LINES, head.nonce)
        if head.schema_version == OUTPUT_VERSION:
            output = _decode_output(line)
            return Mark(head.run_id, "output", output.offset + output.size_bytes, head.nonce)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return Mark(head.run_id, "event", head.seq, head.nonce) if head.seq else None


def completion(half: bytes, lines: bytes) -> bytes | None:
    """What is missing of `lines` where `half` of the first one is written; None where it is not of that line.

    Of an output line the time may be another one by now: what is there of it stays.
    """
    if lines.startswith(half):
        return lines[len(half) :]
    line, newline, rest = lines.partition(b"\n")
    head, time, digits = line.rpartition(_TIME)
    if not time or not half.startswith(head + time):
        return None
    begun = _IS_TIME_BEGUN.match(half[len(head + time) :])
    if begun is None or (begun[2] and not begun[1]):
        return None
    is_ended = bool(begun[2])
    missing = b"" if is_ended else b"0" * (len(digits) - 1 - len(begun[1])) + b"}"
    return missing + newline + rest


def output_line(run_id: str, piece: tuple[int, int, int, bool, str], now_ms: int, nonce: str = "") -> bytes:
    attempt, offset, size_bytes, is_partial, message = piece
    line: Any = OutputLine(
        run_id=run_id,
        attempt=attempt,
        offset=offset,
        size_bytes=size_bytes,
        is_partial=is_partial,
        message=message,
        nonce=nonce or msgspec.UNSET,
        timestamp_ms=now_ms,
    )
    return _encode(line) + b"\n"
