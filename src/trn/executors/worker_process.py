"""A worker's processes on this machine, by identity: watch, signal and end them. Needs no launcher."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from gen_worker.launcher_protocol import (
    AttemptRecord,
    boot_id,
    claim,
    has_mark,
    is_same_process,
    process_mark,
    read_record,
    record_path,
)
from trn.executors.base import WorkerIdentity

END_PATIENCE_S = 20.0
FIRST_POLL_S, MAX_POLL_S = 0.0005, 0.01


def is_alive(identity: WorkerIdentity) -> bool:
    return is_same_process(identity.pid, identity.start_ticks, identity.boot_id)


def take_or_find(attempt_dir: str, number: int) -> WorkerIdentity | None:
    """The process of the attempt; None once the attempt is given up, by us now or by someone before."""
    path = record_path(attempt_dir, number)
    record = read_record(path)
    if record is None:
        given_up = AttemptRecord(abandoned=True)
        record = given_up if claim(path, given_up) else read_record(path)
    if record is None or record.abandoned:
        return None
    return WorkerIdentity(boot_id=record.boot_id, pid=record.pid, start_ticks=record.start_ticks)


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
        poll_s = FIRST_POLL_S
        while left := [
            pid for pid, ticks in stopped.items() if is_same_process(pid, ticks, identity.boot_id)
        ]:
            if time.monotonic() > deadline:
                return left
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_POLL_S)
        if not stopped:
            return []


class _Process(NamedTuple):
    parent: int
    group: int
    session: int
    start_ticks: int
    is_ended: bool


def _belonging(identity: WorkerIdentity) -> dict[int, int]:
    """pid -> start ticks of every living process that is the worker, descends from it, is of its session or group,
    or inherited its mark.
    """
    earliest = identity.start_ticks or 0
    mark = process_mark(identity.pid, identity.start_ticks)
    # Nothing that a worker started is older than it; so most of a busy machine is passed over at once.
    younger = {pid: one for pid, one in _processes() if one.start_ticks >= earliest and pid != os.getpid()}
    root = younger.get(identity.pid)
    is_reused = root is not None and identity.start_ticks not in (None, root.start_ticks)
    children: dict[int, list[int]] = {}
    ours: set[int] = set()
    for pid, one in younger.items():
        children.setdefault(one.parent, []).append(pid)
        if pid == identity.pid:
            is_ours = not is_reused
        else:
            is_related = not is_reused and identity.pid in (one.group, one.session)
            is_ours = is_related or has_mark(pid, mark)
        if is_ours:
            ours.add(pid)
    waiting = list(ours)
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in ours]
        ours.update(fresh)
        waiting += fresh
    return {pid: younger[pid].start_ticks for pid in ours if not younger[pid].is_ended}


def _processes() -> Iterator[tuple[int, _Process]]:
    """Every process there is, as the system sees it."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{entry.name}/stat", "rb") as file:  # noqa: PTH123  (hot)
            letter, parent, group, session, *rest = file.read().rpartition(b")")[2].split()
            yield (
                int(entry.name),
                _Process(int(parent), int(group), int(session), int(rest[15]), letter in (b"Z", b"X")),
            )


def _kill(pid: int, ticks: int, number: int) -> None:
    with contextlib.suppress(PermissionError):
        send_signal(WorkerIdentity(boot_id=boot_id(), pid=pid, start_ticks=ticks), number)
