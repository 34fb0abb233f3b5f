"""Which worker a process belongs to, and killing a worker with everything it started. Linux only.

Every process of a worker carries its mark, `pid:start` of the worker, in three places, because a process can lose each:

- the soft limit RLIMIT_LOCKS, which Linux keeps but ignores since 2.4.25. Forks and executed programs inherit it, also
  with a new session, an empty environment and closed descriptors. Everyone may read it.
- the environment, for programs that the worker executes.
- the name of a descriptor, for the forks of a warm worker, which is never executed.

Not found: a program that sets this limit itself, and one that another service starts (cron, systemd, containers).
"""

import contextlib
import hashlib
import os
import signal
import time

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.process_identity import (
    GONE,
    boot_id,
    is_same_process,
    list_pids,
    read_fd_target,
    read_process,
)

PROCESS_MARK = "GEN_WORKER_PROCESS"
MARK_FD = 199  # a fixed number, to find it with one call; above those that programs choose
RLIMIT_LOCKS = 10  # the module `resource` has no name for it
LIMIT_NAME = b"Max file locks"
END_PATIENCE_S = 20.0
FIRST_POLL_S, MAX_POLL_S = 0.0005, 0.01


def process_mark(pid: int, start_ticks: int | None) -> str:
    return f"{pid}:{'' if start_ticks is None else start_ticks}"


def hold_mark(mark: str) -> None:
    """Mark this process and all that it will start. Programs that it executes inherit the limit only."""
    with contextlib.suppress(OSError, ValueError, ImportError):  # no such limit, or a lower hard limit
        import resource

        _, most = resource.getrlimit(RLIMIT_LOCKS)
        resource.setrlimit(RLIMIT_LOCKS, (_number(mark), most))
    with contextlib.suppress(OSError, AttributeError):
        fd = os.memfd_create(f"{PROCESS_MARK}={mark}")
        try:
            os.dup2(fd, MARK_FD, inheritable=False)
        finally:
            os.close(fd)


def has_mark(pid: int, mark: str) -> bool:
    """OSError where it cannot be found out: out of descriptors, say."""
    try:
        held = read_fd_target(pid, MARK_FD)
        if held == f"/memfd:{PROCESS_MARK}={mark} (deleted)":
            return True
    except (*GONE, PermissionError):  # no such descriptor or process, or not readable
        pass
    if _limit_of(pid) == _number(mark):
        return True
    with contextlib.suppress(*GONE, PermissionError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        return f"{PROCESS_MARK}={mark}".encode() in file.read().split(b"\0")
    return False


def read_mark(pid: int) -> tuple[int, int | None] | None:
    """(pid, start ticks) of the worker that this process belongs to; None where it has no mark."""
    text = ""
    with contextlib.suppress(*GONE, PermissionError):
        name = read_fd_target(pid, MARK_FD).removesuffix(" (deleted)")
        if name.startswith(f"/memfd:{PROCESS_MARK}="):
            text = name.partition("=")[2]
    if not text:
        with contextlib.suppress(*GONE, PermissionError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            marks = (
                item for item in file.read().split(b"\0") if item.startswith(f"{PROCESS_MARK}=".encode())
            )
            text = next(marks, b"").decode(errors="replace").partition("=")[2]
    root, _, ticks = text.partition(":")
    if not root.isdigit():
        return None
    return int(root), int(ticks) if ticks.isdigit() else None


def _number(mark: str) -> int:
    """The mark as a limit of 61 bits, above any real one."""
    digest = hashlib.sha256(f"{boot_id()} {mark}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 3 | 1 << 60


def _limit_of(pid: int) -> int | None:
    with contextlib.suppress(*GONE, PermissionError, ValueError), open(f"/proc/{pid}/limits", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(LIMIT_NAME):
                return int(line.removeprefix(LIMIT_NAME).split()[0])
    return None


def send_process_signal(pid: int, start_ticks: int | None, boot: str, number: int) -> bool:
    """Send a signal to that very process; False where it has exited."""
    fd = open_pidfd(pid)
    try:
        if not is_same_process(pid, start_ticks, boot):  # the open descriptor keeps it this process
            return False
        if fd is not None:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


def open_pidfd(pid: int) -> int | None:
    """None where there is no such process, or no pidfd on this system."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def end_family(
    pid: int, start_ticks: int | None, boot: str, *, patience_s: float = END_PATIENCE_S
) -> list[int]:
    """SIGKILL that process and everything it started; blocks. Returns the pids that are left after `patience_s`.

    All are stopped before the first is killed, so that none can start another. OSError where /proc cannot be read.
    """
    if boot != boot_id():
        return []
    deadline = time.monotonic() + patience_s
    while True:
        stopped: dict[int, int] = {}
        while found := {
            one: ticks for one, ticks in find_family(pid, start_ticks).items() if one not in stopped
        }:
            for one, ticks in found.items():
                _kill(one, ticks, signal.SIGSTOP)
            stopped |= found
        for one, ticks in stopped.items():
            _kill(one, ticks, signal.SIGKILL)
        poll = DoublingDelay(FIRST_POLL_S, MAX_POLL_S)
        while left := [one for one, ticks in stopped.items() if is_same_process(one, ticks, boot)]:
            if time.monotonic() > deadline:
                return left
            time.sleep(poll.next_s())
        if not stopped:
            return []


def _kill(pid: int, ticks: int, number: int) -> None:
    with contextlib.suppress(PermissionError):
        send_process_signal(pid, ticks, boot_id(), number)


def find_family(root_pid: int, start_ticks: int | None) -> dict[int, int]:
    """pid -> start ticks of the worker, its descendants, its session and group, and all with its mark."""
    earliest = start_ticks or 0
    mark = process_mark(root_pid, start_ticks)
    # Nothing that a worker started is older than it.
    younger = {}
    for pid in list_pids():
        with contextlib.suppress(PermissionError):
            one = read_process(pid)
            if one is not None and one.start_ticks >= earliest and pid != os.getpid():
                younger[pid] = one
    root = younger.get(root_pid)
    is_reused = root is not None and start_ticks not in (None, root.start_ticks)
    children: dict[int, list[int]] = {}
    ours: set[int] = set()
    for pid, one in younger.items():
        children.setdefault(one.parent, []).append(pid)
        if pid == root_pid:
            is_ours = not is_reused
        elif one.is_ended:
            is_ours = False  # its children have another parent
        else:
            is_related = not is_reused and root_pid in (one.group, one.session)
            is_ours = is_related or has_mark(pid, mark)
        if is_ours:
            ours.add(pid)
    waiting = list(ours)
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in ours]
        ours.update(fresh)
        waiting += fresh
    return {pid: younger[pid].start_ticks for pid in ours if not younger[pid].is_ended}
