"""A run at a terminal: a progress bar, and lines above it in the order of their time.

`RunView` is the state of the run; `Screen` draws it, a few times a second at most.
"""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trn.client.screen.run_view import RunView, conclude
from trn.client.screen.worker_log import Line

REDRAW_S = 0.2
MAX_WAITING_LINES = 400  # between two redraws; the log has them all
MIN_WORDS = 20  # columns that the words of a log record have at least
HELD_S = 0.7  # events wait: an earlier line of the worker's log may arrive later


class Screen:
    """Draws a RunView at a terminal. One thread may call `redraw` at any rate; it limits itself."""

    def __init__(
        self, view: RunView, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.view = view
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._waiting: list[tuple[float, Line]] = []  # (when it came, the line)
        self._held_until_s = 0.0
        self._log_ms = 0  # up to which the worker's log is known
        self._num_dropped = 0
        self._is_new = True
        self._clock = clock
        self._drawn_s = -1.0

    def start(self) -> None:
        if self._live is None:
            self._live = Live(
                self.view.draw(self.console.width),
                console=self.console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                transient=True,
            )
            self._live.start(refresh=True)

    def pause(self) -> None:
        """Remove the bar, so that others may write; lines wait."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def hold(self, held_s: float) -> None:
        """Show no lines for so long: the past arrives by two streams and is sorted first."""
        self._held_until_s = self._clock() + held_s

    def add(self, lines: Sequence[Line]) -> None:
        now_s = self._clock()
        self._waiting += [(now_s, line) for line in lines]
        self._log_ms = max([self._log_ms, *(line.at_ms for line in lines if not line.is_event)])
        if len(self._waiting) > 2 * MAX_WAITING_LINES:
            self._waiting.sort(key=_when)
            self._drop(self._waiting)
        self._is_new = True

    def changed(self) -> None:
        self._is_new = True

    def redraw(self) -> None:
        """Draw if something is new, at most every `REDRAW_S`; at least once a second."""
        if self._live is None:
            return
        since_s = self._clock() - self._drawn_s
        if since_s < (REDRAW_S * 0.9 if self._is_new or self._waiting else 1.0):
            return
        self._is_new = False
        self._flush()
        self._live.update(self.view.draw(self.console.width), refresh=True)
        self._drawn_s = self._clock()

    def _flush(self, *, is_last: bool = False) -> None:
        now_s = self._clock()
        if now_s < self._held_until_s and not is_last:
            return
        ready: list[tuple[float, Line]] = []
        waiting: list[tuple[float, Line]] = []
        for came_s, line in self._waiting:
            is_held = line.is_event and line.at_ms > self._log_ms and now_s - came_s < HELD_S
            (waiting if is_held and not is_last else ready).append((came_s, line))
        self._waiting = waiting
        ready.sort(key=_when)
        self._drop(ready)
        shown = [part for _, line in ready for part in self._wrap(line)]
        if self._num_dropped:
            count, self._num_dropped = self._num_dropped, 0
            shown.insert(0, Text(f"… {count:,} more lines: see trn logs and trn watch --json", style="dim"))
        if shown:
            self.console.print(Text("\n").join(shown), soft_wrap=True)

    def _wrap(self, line: Line) -> list[Text]:
        """Events and log records are wrapped between words; other output of a worker stays as it is."""
        if not line.is_event and not line.margin:
            return [line.text]
        time, words = line.text.divide([line.margin])
        first, *more = words.wrap(self.console, max(MIN_WORDS, self.console.width - line.margin))
        return [time + first, *(Text(" " * line.margin) + part for part in more)]

    def _drop(self, lines: list[tuple[float, Line]]) -> None:
        num_over = max(0, len(lines) - MAX_WAITING_LINES)
        self._num_dropped += num_over
        del lines[:num_over]

    def finish(self, took_s: float) -> None:
        """Print the remaining lines, how the run ended, and what to do next."""
        self.pause()
        self._flush(is_last=True)
        self.console.print(conclude(self.view, took_s, self.console.width), soft_wrap=True)


def _when(item: tuple[float, Line]) -> tuple[int, bool]:
    return item[1].at_ms, item[1].is_event
