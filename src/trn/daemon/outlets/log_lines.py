"""The lines of the logs. Every line has a key, so a reader can drop repeats.

The key is (run_id, nonce) and: `seq` of an event, `offset` of an output line, `event` of a job line.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from trn.core.causes import Cause
from trn.core.number_words import as_word
from trn.core.runs import RunRecord
from trn.executors.base import AttemptStart

MAX_MESSAGE_BYTES = 16 << 10  # of an output line; a longer one is split
NUM_JOB_LINES = 2

_encoder = msgspec.json.Encoder()
encode_lines = _encoder.encode_lines


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a worker printed, or a part of one that is too long."""

    schema_version: str = "trainer_log.v1"
    event: str = "output"
    run_id: str
    attempt: int
    offset: int  # in worker.log
    size_bytes: int  # in worker.log, with the newline
    is_partial: bool  # the next line continues it
    message: str
    nonce: str | msgspec.UnsetType = msgspec.UNSET  # of the submission; runs of older releases have none
    timestamp_ms: int  # when it was copied


class JobLine(msgspec.Struct, frozen=True, kw_only=True):
    """What both lines of the jobs index have."""

    schema_version: str = "trainer_job.v1"
    event: str
    run_id: str
    state: str
    name: str
    parent_run_id: str
    digest: str
    tags: dict[str, str]
    folder: str
    submitted_ms: int
    nonce: str | msgspec.UnsetType = msgspec.UNSET
    timestamp_ms: int


class JobSubmitted(JobLine, frozen=True, kw_only=True):
    priority: int


class JobEnded(JobLine, frozen=True, kw_only=True):
    reason: str  # `cause` in words
    cause: Cause
    attempt: int
    step: int
    end_step: int | None
    metrics: dict[str, float | str]  # a number, or nan, inf, -inf as a string
    devices: tuple[str, ...]
    final_checkpoint: str
    ended_ms: int
    stop_reason: str


def job_submitted(run: RunRecord, folder: str) -> bytes:
    fields = _job_fields(run, folder)
    line = JobSubmitted(
        **fields,
        event="job_submitted",
        state="PENDING",
        priority=run.priority,
        timestamp_ms=run.submitted_ms,
    )
    return encode_lines([line])


def job_ended(run: RunRecord, folder: str, final_checkpoint: str) -> bytes:
    ended_ms = run.ended_ms or run.updated_ms
    line = JobEnded(
        **_job_fields(run, folder),
        event=f"job_{run.state.lower()}",
        state=run.state,
        reason=run.reason,
        cause=run.cause,
        attempt=run.attempt,
        step=run.step,
        end_step=run.end_step,
        metrics={name: as_word(value) for name, value in run.metrics.items()},
        devices=run.devices,
        final_checkpoint=final_checkpoint,
        ended_ms=ended_ms,
        stop_reason=run.stop_reason,
        timestamp_ms=ended_ms,
    )
    return encode_lines([line])


def _job_fields(run: RunRecord, folder: str) -> dict[str, Any]:
    names = ("run_id", "name", "parent_run_id", "digest", "tags", "submitted_ms")
    fields = {name: getattr(run, name) for name in names}
    return {**fields, "folder": folder, "nonce": run.nonce or msgspec.UNSET}


def split_output(
    data: bytes,
    offset: int,
    *,
    run_id: str,
    nonce: str = "",
    now_ms: int = 0,
    is_all: bool,
    starts: Sequence[AttemptStart] = (),
) -> Iterator[OutputLine]:
    """The lines in `data`, which begins at `offset` of worker.log.

    A line ends at its newline, where another attempt begins, or, with `is_all`, at the end of the data. An unfinished
    line is left for later. The result depends only on the file, not on when it is read: a repeat has the same key.
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
            stop, is_partial = _character_start(data, at + MAX_MESSAGE_BYTES), True
        elif is_all or (end is not None and limit == end - offset):
            stop = limit
        else:
            return
        yield OutputLine(
            run_id=run_id,
            attempt=number,
            offset=offset + at,
            size_bytes=stop - at,
            is_partial=is_partial,
            message=data[at:stop].removesuffix(b"\n").decode("utf-8", "backslashreplace"),
            nonce=nonce or msgspec.UNSET,
            timestamp_ms=now_ms,
        )
        at = stop


def _attempt_at(starts: Sequence[AttemptStart], offset: int) -> tuple[int, int | None]:
    """(the attempt that printed there, where the next attempt begins)."""
    number = starts[0].number if starts else 1
    for start in starts:
        if start.offset > offset:
            return number, start.offset
        number = start.number
    return number, None


def _character_start(data: bytes, at: int) -> int:
    """`at`, or up to 3 bytes before it: not inside a UTF-8 character."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at  # it is not UTF-8
