"""A program of the worker's side, run beside the command line: it knows torch and parquet, which `trn` never loads."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from trn.core.errors import TrnError

END_PATIENCE_S = 5.0  # for a tool that was asked to end
LOOK_EVERY_S = 0.02


@contextlib.contextmanager
def reading_records(module: str, arguments: Sequence[str]) -> Iterator[Iterator[dict[str, Any]]]:
    """The JSON lines of `python -m gen_worker.tools.<module>`, as they come; its stderr is ours.

    How it judged is in the records; its exit code counts only where it printed none. Ctrl-C, SIGTERM and SIGHUP are
    ours alone: whoever leaves early ends the tool, and whatever it started.
    """
    # -P: a folder here that is named like a module of ours must not stand in for it.
    command = [sys.executable, "-P", "-m", f"gen_worker.tools.{module}", *arguments]
    with _leaving_on_signals() as door:
        # A group of its own, so that a terminal's Ctrl-C does not strike it in the middle of an import.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0)
        try:
            door.open()
            yield _read(process, command)
        finally:
            _end(process)


def _read(process: "subprocess.Popen[bytes]", command: list[str]) -> Iterator[dict[str, Any]]:
    is_told = False
    assert process.stdout is not None
    for line in process.stdout:
        is_told = True
        yield json.loads(line)
    code = process.wait()
    if code < 0 or not is_told:
        raise TrnError(f"{' '.join(command)} ended with {code} before it was done")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Nothing of its group is left. It is asked first, and has a moment to remove what it made."""
    assert process.stdout is not None
    process.stdout.close()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        deadline = time.monotonic() + END_PATIENCE_S
        # Not reaped before the group is gone: its number is ours until then.
        while (
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_EVERY_S)
    finally:  # also where Ctrl-C is pressed again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Door:
    """Whoever wants to leave before there is something to end waits until there is."""

    def __init__(self) -> None:
        self._is_open = self._is_wanted = False

    def open(self) -> None:
        self._is_open = True
        if self._is_wanted:
            raise KeyboardInterrupt

    def leave(self, _number: int, _frame: FrameType | None) -> None:
        self._is_wanted = True
        if self._is_open:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _leaving_on_signals() -> Iterator[_Door]:
    """To be asked to go is the same as Ctrl-C: what was started is ended."""
    door = _Door()
    before = {
        number: signal.signal(number, door.leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield door
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
