"""How the daemon and the gateway end as programs: with the reason why they did not start, and always with their own exit code."""

import os
import sys
from typing import NoReturn

from trn.core.errors import AlreadyRunningError, TrnError
from trn.core.home import DISK_FAULTS, Home
from trn.core.terminal_text import keep_lines

EXIT_REFUSED = 1


def refuse(home: Home, fault: TrnError | OSError) -> int:
    """Say on stderr why it does not start. Any other error of the system than one of the disk is raised again."""
    if isinstance(fault, OSError) and fault.errno not in DISK_FAULTS:
        raise fault
    error = home.unwritable(fault) if isinstance(fault, OSError) else fault
    try:
        print(keep_lines(f"trn: {error}"), file=sys.stderr)  # noqa: T201
    except OSError:  # stderr is a file on the full disk, or its reader has gone
        pass
    return error.daemon_exit_code if isinstance(error, AlreadyRunningError) else EXIT_REFUSED


def leave(code: int) -> NoReturn:
    """Exit with this code even where the last of the output cannot be written: Python would make it 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
