"""Searches a log of any length in bounded memory, a piece of work at a time."""

import os
import time
from typing import NamedTuple

import msgspec

READ_BYTES = 1 << 20
MAX_LINE = 4096  # of a line that is shown
MAX_SEARCHED = 256 << 20
MAX_S = 1.0


class LogMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A line that has the text. `offset` is of its first byte; a long one is cut around the text."""

    offset: int
    line: str


class Found(NamedTuple):
    matches: list[LogMatch]
    next_offset: int  # to continue there
    is_end: bool  # that was all there is now


def search_log(fd: int, wanted: bytes, *, begin: int, limit: int, is_case_ignored: bool) -> Found:
    """Lines from `begin` on, a line's start, that have `wanted`. Blocks for about a second at most."""
    size = os.fstat(fd).st_size
    deadline = time.monotonic() + MAX_S
    needle = wanted.lower() if is_case_ignored else wanted
    matches: list[LogMatch] = []
    at = begin  # the start of a line
    while at < size:
        data = os.pread(fd, READ_BYTES, at)
        if not data:
            break
        # Whole lines; of a line that is longer than all of it, pieces that overlap.
        cut = len(data) if at + len(data) >= size else data.rfind(b"\n") + 1
        piece = data[:cut] if cut else data
        step = cut or max(len(data) - len(needle) + 1, 1)
        text = piece.lower() if is_case_ignored else piece
        place = 0
        while (hit := text.find(needle, place)) >= 0:
            start = text.rfind(b"\n", 0, hit) + 1
            end = text.find(b"\n", hit)
            place = step if end < 0 else end + 1
            end = len(text) if end < 0 else end
            matches.append(LogMatch(offset=at + start, line=_show(piece, start, end, hit)))
            if len(matches) >= limit:
                return Found(matches, at + place, is_end=at + place >= size)
            if end == len(text):
                break
        at += step
        if time.monotonic() > deadline or at - begin > MAX_SEARCHED:
            break
    return Found(matches, min(at, size), at >= size)


def _show(piece: bytes, start: int, end: int, hit: int) -> str:
    if end - start > MAX_LINE:
        start = max(start, hit - MAX_LINE // 2)
        end = min(end, start + MAX_LINE)
    return piece[start:end].decode(errors="replace")
