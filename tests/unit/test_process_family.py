"""Claims about whose a process is: nothing that a worker started is missed, and doubt is never taken for an end."""

import contextlib
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gen_worker.contract.process_identity import boot_id, is_same_process, read_process
from gen_worker.launcher.process_family import end_family, find_family, has_mark, process_mark

# Marks itself as a worker would, and then starts one who leaves: parent, session, environment and descriptors are gone.
WORKER = """
import os, signal, sys
from gen_worker.contract.process_identity import read_process
from gen_worker.launcher.process_family import hold_mark, process_mark

hold_mark(process_mark(os.getpid(), read_process(os.getpid()).start_ticks))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(1, f"{os.getpid()}\\n".encode())
        os.closerange(0, 4096)
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    os._exit(0)
os.wait()
signal.pause()
"""
FIRST_THREAD_ENDS = """
import ctypes, sys, threading
libc = ctypes.CDLL(None)
threading.Thread(target=libc.sleep, args=(600,)).start()
print("ready", flush=True)
libc.syscall(int(sys.argv[1]), 0)
"""
NUM_EXIT = {"x86_64": 60, "aarch64": 93}


@pytest.fixture
def worker() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A marked process, and the pid of the one that left it."""
    process = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    escaped = int(process.stdout.readline())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{escaped}/environ").read_bytes() or Path(f"/proc/{escaped}/fd/199").is_symlink():
        assert time.monotonic() < deadline, "it never became another program"
    yield process, escaped
    process.kill()
    process.wait()
    process.stdout.close()
    if read_process(escaped) is not None:
        os.kill(escaped, signal.SIGKILL)


def ticks_of(pid: int) -> int:
    state = read_process(pid)
    assert state is not None
    return state.start_ticks


def test_what_left_with_nothing_of_its_worker_is_still_its_workers(
    worker: tuple["subprocess.Popen[str]", int],
) -> None:
    process, escaped = worker
    ticks = ticks_of(process.pid)
    escaped_ticks = ticks_of(escaped)
    assert set(find_family(process.pid, ticks)) == {process.pid, escaped}
    process.kill()
    process.wait()
    assert set(find_family(process.pid, ticks)) == {escaped}  # also when the worker itself is gone
    assert end_family(process.pid, ticks, boot_id()) == []
    assert not is_same_process(escaped, escaped_ticks, boot_id())


def test_another_boot_or_another_worker_has_another_mark(
    worker: tuple["subprocess.Popen[str]", int],
) -> None:
    process, escaped = worker
    ticks = ticks_of(process.pid)
    assert has_mark(escaped, process_mark(process.pid, ticks))
    assert not has_mark(escaped, process_mark(process.pid, ticks + 1))
    assert not has_mark(os.getpid(), process_mark(process.pid, ticks))


def test_without_descriptors_nobody_is_taken_for_ended(worker: tuple["subprocess.Popen[str]", int]) -> None:
    process, escaped = worker
    ticks = ticks_of(process.pid)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(map(int, os.listdir("/proc/self/fd"))) + 1  # noqa: PTH208
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_open + 8, limit[1]), limit[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(2))
        with pytest.raises(OSError, match="Too many open files"):
            is_same_process(process.pid, ticks, boot_id())
        with pytest.raises(OSError, match="Too many open files"):
            has_mark(escaped, process_mark(process.pid, ticks))
        with pytest.raises(OSError, match="Too many open files"):
            end_family(process.pid, ticks, boot_id())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for fd in fillers:
            os.close(fd)
    assert process.poll() is None


@pytest.mark.skipif(platform.machine() not in NUM_EXIT, reason="the number of the call `exit` is not known")
def test_a_process_whose_first_thread_ended_lives_on() -> None:
    command = [sys.executable, "-c", FIRST_THREAD_ENDS, str(NUM_EXIT[platform.machine()])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        ticks = ticks_of(process.pid)
        while (state := read_process(process.pid)) is not None and state.letter != "Z":
            pass
        assert is_same_process(process.pid, ticks, boot_id())
        assert process.pid in find_family(process.pid, ticks)
        assert end_family(process.pid, ticks, boot_id()) == []
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
