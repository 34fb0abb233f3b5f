"""How a tool runs as a program: JSON lines on stdout, and a quiet end on a signal."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import msgspec

INTERRUPTED = 130


class _Ended(BaseException):
    """Not SystemExit: an author's module may catch that."""


def run_tool(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Exit with what `main` returns. SIGTERM, SIGINT and a closed stdout end it without a message."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    code = INTERRUPTED
    with contextlib.suppress(_Ended, BrokenPipeError):
        code = main(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if code == INTERRUPTED:
        os._exit(code)  # an interrupted import may have left anything
    sys.exit(code)


def print_record(record: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.buffer.flush()
