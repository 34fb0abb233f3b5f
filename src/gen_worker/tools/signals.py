"""How a tool of the worker's side ends when it is asked to: at once, quietly, with what it made removed."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


class _Ended(BaseException):
    """Of our own kind: an author's module that catches SystemExit must not keep us."""


def run_tool(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """End the process with what `main` returns. SIGTERM and SIGINT unwind it without a word, as does a reader that left."""

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
        os._exit(code)  # not through what half an import left behind
    sys.exit(code)
