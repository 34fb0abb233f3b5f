"""Cold imports: a fresh interpreter for every sample, from spawn to exit, page cache warm.

All sides are the same interpreter in the same environment, so that what `site` does at start is in each of them.
Timed with posix_spawn and waitpid: `subprocess` with a timeout polls, which would round every time up.
"""

import os
import sys
import time
from collections.abc import Callable

from bars import Bar, Row, build_row
from harness import Measurements, child_environment, interleave, takes_part

PASS = "python -c pass"
OURS = "import gen_worker.trainer"
AUTHOR = "from gen_worker.trainer import StepContext, StepResult"
BESIDE = ("import msgspec", "import numpy", "import torch", "import lightning")
SLOW = {"import torch", "import lightning"}


def run(*, quick: bool, say: Callable[[str], None]) -> tuple[list[Row], Measurements]:
    num_rounds, num_slow_rounds = (9, 2) if quick else (25, 5)
    measured = Measurements()
    names = (PASS, OURS, AUTHOR, *BESIDE)
    for number, name in interleave(names, num_rounds, seed=1):
        most = num_slow_rounds if name in SLOW else None
        if name in measured.failures or not takes_part(number, num_rounds, most):
            continue
        say(f"round {number + 1}/{num_rounds}: {name}")
        statement = "pass" if name == PASS else name
        if number == 0 and _spawn_ms(statement)[1] != 0:  # also warms the page cache
            measured.failures[name] = f"`{statement}` fails here"
            continue
        measured.samples.setdefault(name, []).append({"ms": _spawn_ms(statement)[0]})
    note = "a fresh interpreter from spawn to exit, page cache warm"
    return [
        build_row(
            measured,
            what="cold import of gen_worker.trainer",
            unit="ms",
            key="ms",
            ours=OURS,
            beside=(PASS, *BESIDE),
            bar=Bar(limit=5, against=(PASS,)),
            note=note,
        ),
        build_row(
            measured,
            what="cold start of an author's module: the names it imports",
            unit="ms",
            key="ms",
            ours=AUTHOR,
            beside=(PASS,),
            note=f"`{AUTHOR}`: names load on first use, so this is what a trainer class pays; no bar is set for it",
        ),
    ], measured


def _spawn_ms(statement: str) -> tuple[float, int]:
    """(wall time, exit status) of one interpreter."""
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    started = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, "-c", statement], child_environment(), file_actions=silence
    )
    _, status = os.waitpid(pid, 0)
    return 1e3 * (time.perf_counter() - started), os.waitstatus_to_exitcode(status)
