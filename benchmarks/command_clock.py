"""A command as a person runs it: a whole process, from its spawn to its end.

Timed with posix_spawn and waitpid: `subprocess` with a timeout polls, which would round every time up.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import HERE

BIN = Path(sys.prefix) / "bin"


def spawn_ms(
    command: Sequence[str], *, home: Path | None = None, cwd: Path = HERE, exit_code: int = 0
) -> float:
    """Wall time of one command; RuntimeError where it does not end as it should."""
    environ = dict(os.environ) | ({"TRN_HOME": str(home)} if home else {})
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    program = shutil.which(command[0])
    if program is None:
        raise RuntimeError(f"there is no {Path(command[0]).name} here")
    before = Path.cwd()
    os.chdir(cwd)
    try:
        started = time.perf_counter()
        pid = os.posix_spawn(program, list(command), environ, file_actions=silence)
        _, status = os.waitpid(pid, 0)
        elapsed_ms = 1e3 * (time.perf_counter() - started)
    finally:
        os.chdir(before)
    code = os.waitstatus_to_exitcode(status)
    if code != exit_code:
        raise RuntimeError(f"`{' '.join(command[1:3])}` of {Path(command[0]).name} ended with {code}")
    return elapsed_ms
