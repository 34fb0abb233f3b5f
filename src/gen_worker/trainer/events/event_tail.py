"""The end of an event file: the last whole event, and how many bytes after it are none."""

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from gen_worker.contract.files.regular import open_regular
from gen_worker.contract.sizes import MAX_EVENT_BYTES

COPY_BYTES = 1 << 20
# Damage may also be nested deeper than the decoder goes, or be no text.
_NOT_AN_EVENT = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class EventTail(msgspec.Struct, frozen=True, kw_only=True):
    """What the next attempt continues from."""

    last_seq: int = 0
    last_attempt: int = 0
    last_event: str | None = None
    last_step: int = 0
    run_id: str | None = None
    nonce: str = ""
    good_bytes: int = 0
    damaged_bytes: int = 0


class EventHead(msgspec.Struct):
    seq: int
    run_id: str
    attempt: int
    event: str = ""
    step: int | None = None
    nonce: str = ""


def read_tail(path: Path) -> EventTail:
    """Find the last whole event. Reads backwards: a long file costs no more than a short one."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return EventTail()
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        block = b""
        start = size
        while start > 0:
            step = min(64 << 10, start)
            start -= step
            file.seek(start)
            block = file.read(step) + block
            found = _last_event(block, is_whole_file=start == 0)
            if found is not None:
                head, end = found
                good = start + end
                return EventTail(
                    last_seq=head.seq,
                    last_attempt=head.attempt,
                    last_event=head.event,
                    last_step=head.step if head.step is not None else _last_step(block[:end]),
                    run_id=head.run_id,
                    nonce=head.nonce,
                    good_bytes=good,
                    damaged_bytes=size - good,
                )
            # Keep only the line that may still become an event.
            begun = block.find(b"\n")
            block = block if begun < 0 else block[: begun + 1]
            if len(block) > MAX_EVENT_BYTES + step:
                start = line_end_before(file, start)
                block = b""
    return EventTail(damaged_bytes=size)


def line_end_before(file: BinaryIO, end: int) -> int:
    """Where the previous line ends; 0 where there is none."""
    while end > 0:
        start = max(end - COPY_BYTES, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _last_event(block: bytes, *, is_whole_file: bool) -> tuple[EventHead, int] | None:
    """The last line of `block` that is an event, and the offset just after its newline."""
    end = block.rfind(b"\n")
    while end >= 0:
        begin = block.rfind(b"\n", 0, end)
        if begin < 0 and not is_whole_file:
            return None
        try:
            if end - begin <= MAX_EVENT_BYTES:  # readers refuse longer ones
                return msgspec.json.decode(block[begin + 1 : end], type=EventHead), end + 1
        except _NOT_AN_EVENT:
            pass
        end = begin
    return None


def _last_step(block: bytes) -> int:
    """The step of the last event in `block` that has one."""
    for line in reversed(block.splitlines()[1:]):
        try:
            head = msgspec.json.decode(line, type=EventHead)
        except _NOT_AN_EVENT:
            return 0
        if head.step is not None:
            return head.step
    return 0
