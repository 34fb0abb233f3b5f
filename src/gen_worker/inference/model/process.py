"""What a forked model process does first, and how it exits. Linux: elsewhere a process does not die with its parent."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gen_worker.contract.process_identity import read_process

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_IGNORED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")  # the server drains, and ends its model processes


def settle_in(parent_pid: int) -> None:
    """Die with that parent, and leave signals to the server."""
    signal.set_wakeup_fd(-1)
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before
        os._exit(1)


def adopt_orphans() -> None:
    """From now on this process is the parent of what its children leave behind."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def run_to_exit(work: Callable[[], int]) -> NoReturn:
    """Run it and exit, without unwinding into the frames and exit functions of the process that forked this one."""
    code = 1
    try:
        code = work()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_output()
        os._exit(code & 0xFF)


def flush_output() -> None:
    """Before a fork and before an exit: what is in a buffer would be written twice, or never."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def count_threads() -> int:
    """Of this process; 1 where the system does not say."""
    state = read_process(os.getpid())
    return 1 if state is None else state.num_threads


def join_before_fork(thread: threading.Thread) -> None:
    """Returns when the system has ended it, too, a moment after Python: a fork must not see it."""
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        time.sleep(0)


def limit_memory(memory_mb: int | None) -> None:
    """So much more than now: what needs more raises, and the process lives."""
    if memory_mb is None:
        return
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            limit = int(line.split()[1]) * 1024 + (memory_mb << 20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
