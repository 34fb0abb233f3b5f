"""A worker's output as lines for a terminal: shortened, without control characters and without repeats.

Of a traceback, frames of the author and of libraries are shown, but not ours; the log has them all.
"""

import contextlib
import re
import time
from dataclasses import dataclass

from rich.text import Text

from gen_worker.errors import END_LOGGER, NEWS_LOGGER, REPORT_MARK
from trn.core.terminal_text import SHORT_LINE, clean, without_copies

_LOG_LINE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) ((\d\d):(\d\d):(\d\d)),(\d{3}) ([A-Z]+) ([\w.]+): (.*)", re.ASCII
)
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_OURS = re.compile(r"/gen_worker/[\w/]*\.py|<frozen runpy>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line above the bar, and its time. `is_event`: it may be ahead of the worker's log.

    `margin`: the first columns of a log record, which hold its time.
    """

    text: Text
    at_ms: int = 0
    is_event: bool = False
    margin: int = 0


class WorkerLog:
    """Bytes of a worker's log -> lines to show. A line without a time has that of the line before."""

    def __init__(self, *, is_begun_in_the_middle: bool = False) -> None:
        self._lines = WholeLines(is_begun_in_the_middle=is_begun_in_the_middle)
        self._at_ms = 0
        self._is_traceback = self._is_our_frame = False

    def take(self, data: bytes) -> list[Line]:
        return self._show(self._lines.take(data))

    def rest(self) -> list[Line]:
        return self._show(self._lines.rest())

    def _show(self, lines: list[str]) -> list[Line]:
        shown = (self._take(clean(line)) for line in lines)
        return [line for line in shown if line is not None]

    def _take(self, text: str) -> Line | None:
        """None: not shown."""
        found = _LOG_LINE.fullmatch(text)
        if found is not None:
            return self._take_record(found)
        if text == _TRACEBACK:
            self._is_traceback, self._is_our_frame = True, False
        elif self._is_traceback and text.startswith("  "):
            frame = _FRAME.match(text)
            if frame is not None:
                self._is_our_frame = _OURS.search(frame[1]) is not None
            if self._is_our_frame:
                return None
            text = without_copies(text) if frame is not None else text
        elif text.startswith(REPORT_MARK):  # the line about the end of the attempt has it
            return None
        else:
            self._is_traceback = False
        return Line(text=Text(text), at_ms=self._at_ms)

    def _take_record(self, found: "re.Match[str]") -> Line | None:
        year, month, day, clock, hour, minute, second, ms, level, logger, message = found.groups()
        self._is_traceback = False
        local = (int(year), int(month), int(day), int(hour), int(minute), int(second), 0, 0, -1)
        with contextlib.suppress(ValueError, OverflowError):  # a line of the author's that looks like one
            self._at_ms = max(self._at_ms, int(time.mktime(local)) * 1000 + int(ms))
        if logger in (END_LOGGER, NEWS_LOGGER):
            return None
        shown = Text()
        shown.append(f"{clock} ", style="dim")
        shown.append(message, style=_STYLES.get(level, ""))
        return Line(text=shown, at_ms=self._at_ms, margin=len(clock) + 1)


class WholeLines:
    """Bytes -> whole lines."""

    def __init__(self, *, is_begun_in_the_middle: bool = False) -> None:
        self._rest = b""
        self._is_half = is_begun_in_the_middle

    def take(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > SHORT_LINE * 4:  # one that does not end is shown in parts
            whole.append(self._rest)
            self._rest = b""
        if self._is_half and whole:
            self._is_half = False
            del whole[0]
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []
