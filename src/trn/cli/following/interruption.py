"""Ctrl-C and SIGTERM for a command that follows its own run.

At a terminal the first Ctrl-C asks: detach, cancel, or continue; a second one cancels. Without a terminal the first one
cancels. While the run is being cancelled, another Ctrl-C leaves at once. SIGTERM detaches.
"""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

QUESTION = "The run continues: detach (d), cancel it (c) or keep following (Enter)? "


class StopReason(Enum):
    """Why following stops before the run has ended."""

    DETACH = auto()
    LEAVE = auto()  # by Ctrl-C


class Interruption:
    """Signals of one followed run. `stop` is set once the caller shall stop following."""

    def __init__(
        self,
        *,
        is_ours: bool,
        can_ask: bool,
        cancel: Callable[[], None],
        pause: Callable[[], None],
        go_on: Callable[[], None],
    ) -> None:
        """`cancel` cancels the run; `pause` and `go_on` are called around a question at the terminal."""
        self.stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._is_ours = is_ours
        self._can_ask = can_ask and sys.stdin is not None and sys.stdin.isatty()
        self._cancel, self._pause, self._go_on = cancel, pause, go_on
        self._is_cancelling = False
        self._terminal: list[Any] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM within this block."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._stop_for, StopReason.DETACH)
        try:
            yield
        finally:
            self._end_question()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def interrupt(self) -> None:
        """One Ctrl-C."""
        if not self._is_ours or self._is_cancelling:
            self._stop_for(StopReason.LEAVE)
        elif self._can_ask and self._terminal is None:
            self._ask()
        else:
            self._choose_cancel()

    def _stop_for(self, reason: StopReason) -> None:
        self._end_question()
        if not self.stop.done():
            self.stop.set_result(reason)

    def _choose_cancel(self) -> None:
        self._is_cancelling = True
        was_asked = self._end_question()
        self._cancel()
        if was_asked:
            self._go_on()

    def _ask(self) -> None:
        fd = sys.stdin.fileno()
        self._pause()
        try:
            self._terminal = termios.tcgetattr(fd)
            tty.setcbreak(fd)  # a single key answers
            termios.tcflush(fd, termios.TCIFLUSH)  # drop what was typed before the question
        except termios.error:
            self._terminal = None
            self._choose_cancel()
            return
        asyncio.get_running_loop().add_reader(fd, self._read_key)
        sys.stdout.write(f"\r{QUESTION}")
        sys.stdout.flush()

    def _read_key(self) -> None:
        try:
            key = os.read(sys.stdin.fileno(), 1).lower()
        except OSError:
            key = b""
        if key in (b"d", b""):
            self._stop_for(StopReason.DETACH)
        elif key == b"c":
            self._choose_cancel()
        elif key in (b"\n", b"\r"):
            self._end_question()
            self._go_on()

    def _end_question(self) -> bool:
        """Restore the terminal. Returns whether a question was open."""
        if self._terminal is None:
            return False
        fd, before, self._terminal = sys.stdin.fileno(), self._terminal, None
        asyncio.get_running_loop().remove_reader(fd)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)
        sys.stdout.write("\n")
        sys.stdout.flush()
        return True
