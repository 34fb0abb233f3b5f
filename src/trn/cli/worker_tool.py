"""Runs a tool of `gen_worker` as a process: it needs torch and parquet, which `trn` never imports."""

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

    The result is in the records; the exit code counts only if there are none. Ctrl-C, SIGTERM and SIGHUP, and leaving
    this block early, end the tool and all processes that it started.
    """
    # -P: do not import modules from the current folder.
    command = [sys.executable, "-P", "-m", f"gen_worker.tools.{module}", *arguments]
    with _leaving_on_signals() as door:
        # A process group of its own, so that Ctrl-C does not interrupt it during an import.
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
        raise TrnError(f"{' '.join(command)} exited with {code} before it was done")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL to its process group, so that it can remove its temporary files."""
    assert process.stdout is not None
    process.stdout.close()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        deadline = time.monotonic() + END_PATIENCE_S
        # Reaped last: until then its pid is not reused.
        while (
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            and time.monotonic() < deadline
        ):
            time.sleep(LOOK_EVERY_S)
    finally:  # also after a second Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Interrupt:
    """Delays an interrupt until the process that it should end has started."""

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
def _leaving_on_signals() -> Iterator[_Interrupt]:
    """SIGTERM and SIGHUP act as Ctrl-C."""
    door = _Interrupt()
    before = {
        number: signal.signal(number, door.leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield door
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
