"""What a launcher has to say: a line each in its log, if that takes it."""

import contextlib
import os
import time


def say(text: str) -> None:
    """Never fails: a full disk must not end the launcher, nor stay in a buffer that is tried again before each fork."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} launcher {os.getpid()}: {text}\n"
    with contextlib.suppress(OSError):
        os.write(2, line.encode(errors="backslashreplace"))
