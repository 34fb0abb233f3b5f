"""A terminal that nobody looks at: progress bars draw into it as they would for a person."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from contextlib import suppress

COLUMNS, LINES = 120, 40


class PseudoTerminal:
    """`stream` is the terminal. Another process reads it away, so that nobody here waits for it or works for it.

    `num_bytes` is what was drawn, once the terminal is closed.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        reading_end, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.stream = os.fdopen(terminal, "w", encoding="utf-8")
        self._reader = subprocess.Popen(
            ["wc", "-c"], stdin=reading_end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        os.close(reading_end)

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError, OSError):
            self.stream.close()
        counted, _ = self._reader.communicate()
        self.num_bytes = int(counted)
