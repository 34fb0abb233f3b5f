"""The daemon and the gateway as programs: their log, why they do not start, and an exit code that is always their own."""

import contextlib
import logging
import logging.handlers
import os
import sys
from pathlib import Path
from typing import NoReturn

from trn.core.errors import AlreadyRunningError, TrnError
from trn.core.home import DISK_FAULTS, Home
from trn.core.terminal_text import keep_lines

EXIT_REFUSED = 1
LOG_BYTES, NUM_KEPT_LOGS = 10 << 20, 3


def set_up_log(path: Path, *, is_quiet: bool) -> None:
    """The log of a program in the background, once, at its start: messages may quote workers and clients. Unless it is
    quiet, all goes to stderr, too."""

    class HarmlessFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return keep_lines(super().format(record))

    handlers: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=NUM_KEPT_LOGS)
    ]
    if not is_quiet:
        handlers.append(logging.StreamHandler())
    for handler in handlers:
        handler.setFormatter(HarmlessFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers)


def refuse(home: Home, fault: TrnError | OSError) -> int:
    """Say on stderr why it does not start. Any other error of the system than one of the disk is raised again."""
    if isinstance(fault, OSError) and fault.errno not in DISK_FAULTS:
        raise fault
    error = home.unwritable(fault) if isinstance(fault, OSError) else fault
    with contextlib.suppress(OSError):  # stderr is a file on the full disk, or its reader has gone
        print(keep_lines(f"trn: {error}"), file=sys.stderr)  # noqa: T201
    return error.daemon_exit_code if isinstance(error, AlreadyRunningError) else EXIT_REFUSED


def leave(code: int) -> NoReturn:
    """Exit with this code even where the last of the output cannot be written: Python would make it 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
