"""A worker's processes on this machine, by identity: watch, signal and end them. Needs no launcher."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil

from gen_worker.launcher_protocol import PROCESS_MARK, boot_id, is_same_process, read_process
from trn.executors.base import WorkerIdentity

END_PATIENCE_S = 20.0
POLL_S = 0.01


def is_alive(identity: WorkerIdentity) -> bool:
    return is_same_process(identity.pid, identity.start_ticks, identity.boot_id)


def send_signal(identity: WorkerIdentity, number: int) -> bool:
    """To that very process; False where it is gone."""
    fd = _open_pidfd(identity.pid)
    try:
        if not is_alive(identity):  # after the descriptor is open: it cannot become another's any more
            return False
        if fd is not None:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


@contextlib.contextmanager
def end_alarm(identity: WorkerIdentity, ring: Callable[[], None]) -> Iterator[bool]:
    """While it is entered, `ring` is called in this event loop when the process ends. False: the system has no such
    alarm, and the caller has to look.
    """
    fd = _open_pidfd(identity.pid)
    if fd is None:
        yield False
        return
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(fd)
        ring()

    loop.add_reader(fd, end)
    try:
        yield True
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def end_processes(identity: WorkerIdentity, *, patience_s: float = END_PATIENCE_S) -> list[int]:
    """SIGKILL the worker and everything it started, until none is left; blocks. Returns the pids that would not go.

    All are stopped before the first is killed: so none of them can start another, or slip away from its parent.
    """
    if identity.boot_id != boot_id():
        return []
    deadline = time.monotonic() + patience_s
    while True:
        stopped: dict[int, int] = {}
        while found := {pid: ticks for pid, ticks in _belonging(identity).items() if pid not in stopped}:
            for pid, ticks in found.items():
                _kill(pid, ticks, signal.SIGSTOP)
            stopped |= found
        for pid, ticks in stopped.items():
            _kill(pid, ticks, signal.SIGKILL)
        while left := [
            pid for pid, ticks in stopped.items() if is_same_process(pid, ticks, identity.boot_id)
        ]:
            if time.monotonic() > deadline:
                return left
            time.sleep(POLL_S)
        if not stopped:
            return []


def _belonging(identity: WorkerIdentity) -> dict[int, int]:
    """pid -> start ticks of every living process that is the worker, descends from it, is of its session or group,
    or inherited its mark.
    """
    mark = f"{identity.pid}:{'' if identity.start_ticks is None else identity.start_ticks}"
    children: dict[int, list[int]] = {}
    ours: set[int] = set()
    root = read_process(identity.pid)
    is_reused = root is not None and identity.start_ticks not in (None, root.start_ticks)
    for process in psutil.process_iter(["ppid"]):
        pid = process.pid
        children.setdefault(process.info["ppid"], []).append(pid)
        if pid == identity.pid:
            if not is_reused:
                ours.add(pid)
            continue
        with contextlib.suppress(OSError, psutil.Error):
            if (not is_reused and identity.pid in (os.getsid(pid), os.getpgid(pid))) or process.environ().get(
                PROCESS_MARK
            ) == mark:
                ours.add(pid)
    waiting = list(ours)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in ours:
                ours.add(pid)
                waiting.append(pid)
    states = {pid: read_process(pid) for pid in ours - {os.getpid()}}
    earliest = identity.start_ticks or 0
    return {
        pid: state.start_ticks
        for pid, state in states.items()
        if state is not None and not state.is_ended and state.start_ticks >= earliest
    }


def _kill(pid: int, ticks: int, number: int) -> None:
    with contextlib.suppress(PermissionError):
        send_signal(WorkerIdentity(boot_id=boot_id(), pid=pid, start_ticks=ticks), number)
