"""Which process is it, and does it live? A pid names a process only together with its start time and the boot.

Reads /proc; on a system without it, only whether a pid is in use is known.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

MAX_STAT_BYTES = 4096  # several times a line of /proc/<pid>/stat

# What the system answers for a process that has ended meanwhile. Any other error is no answer.
GONE = (FileNotFoundError, ProcessLookupError)


class ProcessState(NamedTuple):
    """What the system says of one process."""

    letter: str  # Z: its first thread has ended; T: it is stopped; D: it waits for a disk
    parent: int
    group: int
    session: int
    num_threads: int
    start_ticks: int
    cpu_ticks: int  # that it has used

    @property
    def is_ended(self) -> bool:
        """It only waits to be reaped. While other threads of it run, it still holds all that it held."""
        return self.letter in ("Z", "X") and self.num_threads <= 1


@cache
def boot_id() -> str:
    """Another one after each start of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_process(pid: int) -> ProcessState | None:
    """None where there is no such process. OSError where that cannot be found out now. Linux only."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:  # without a file object, whose making and reading takes twice as many calls of the system
            fields = os.read(fd, MAX_STAT_BYTES).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except GONE:
        return None
    return ProcessState(
        letter=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        num_threads=int(fields[17]),
        start_ticks=int(fields[19]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
    )


def list_pids() -> Iterator[int]:
    """Every process that the system shows us; none where there is no /proc."""
    with contextlib.suppress(FileNotFoundError), os.scandir("/proc") as entries:
        yield from (int(entry.name) for entry in entries if entry.name.isdigit())


def read_fd_target(pid: int, fd: int) -> str:
    """Which file that descriptor of the process is. One of GONE where there is none; other OSErrors."""
    return os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115  (hot)


def read_command(pid: int) -> bytes | None:
    """Its arguments, with NUL between them; None where the system does not show any."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"" if Path("/proc/self").exists() else None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where that is not known."""
    with contextlib.suppress(OSError):
        state = read_process(pid)
        return None if state is None else state.start_ticks
    return None


def is_same_process(pid: int, start_ticks: int | None, boot: str) -> bool:
    """Whether that very process lives. One that waits to be reaped does not. OSError where it cannot be found out."""
    if boot != boot_id() or pid <= 0:
        return False
    found = read_process(pid)
    if found is not None:
        return not found.is_ended and start_ticks in (None, found.start_ticks)
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_process_alive(pid: int, start_ticks: int | None = None) -> bool:
    """As `is_same_process`, of this boot; True where it cannot be found out."""
    try:
        return is_same_process(pid, start_ticks, boot_id())
    except OSError:
        return True


class ProcessIdentity(NamedTuple):
    """Names a process for good: pids are used again, this is not."""

    boot_id: str
    pid: int
    start_ticks: int | None = None

    @property
    def ref(self) -> str:
        return f"{self.boot_id}/{self.pid}/{'' if self.start_ticks is None else self.start_ticks}"

    @classmethod
    def of(cls, ref: str) -> "ProcessIdentity":
        """The process of that `ref`. ValueError where it is no such text."""
        boot, pid, ticks = ref.split("/")
        return cls(boot, int(pid), int(ticks) if ticks else None)

    def is_alive(self) -> bool:
        return is_same_process(self.pid, self.start_ticks, self.boot_id)
