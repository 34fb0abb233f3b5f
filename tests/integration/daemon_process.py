"""Real daemons in homes of their own, started, killed and ended by tests."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from gen_worker.launcher.attempt_records import AttemptRecord, record_path
from trn.core.home import Home
from trn.daemon.upkeep.singleton import DaemonInfo, read_daemon_info

DEADLINE_S = 120
SRC = Path(__file__).parents[2] / "src"
MOVED_CLOCK = Path(__file__).with_name("moved_clock.py")
BARE_DAEMON = Path(__file__).with_name("bare_daemon.py")


class DaemonProcess:
    """One daemon of a home. Leaves nothing behind: `end_everything` also ends launcher and workers.

    `clock` is the file of a `MovedClock` that it goes by; `max_open_files` is the most that it can have; `is_bare` is for
    runs that need no torch (see bare_daemon.py).
    """

    def __init__(
        self,
        home: Path,
        *,
        failpoints: str = "",
        settings: str | None = None,
        clock: Path | None = None,
        max_open_files: int | None = None,
        is_bare: bool = False,
    ) -> None:
        self.home = Home(home)
        self.failpoints = failpoints
        self.home.make()
        if settings is not None:
            self.home.settings.write_text(settings)
        self.log = home / "daemon-output.txt"
        environ = {**os.environ, "GEN_WORKER_FAILPOINTS": failpoints}
        program = ["-m", "trn.daemon"]
        if clock is not None:
            program = ["-P", str(MOVED_CLOCK), str(clock)]
        elif is_bare:
            program = ["-P", str(BARE_DAEMON)]
        python = [sys.executable]
        if max_open_files is not None:
            python = ["prlimit", f"--nofile={max_open_files}:{max_open_files}", *python]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*python, *program, "--home", str(home), "serve"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _started.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> DaemonInfo:
        """Until it answers; an AssertionError with its output where it ends instead."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            info = read_daemon_info(self.home)
            if info is not None and info.pid == self.pid:
                return info
            if not self.is_running():
                break
            time.sleep(0.01)
        raise AssertionError(f"no daemon: exit {self.process.poll()}\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """As a power cut would, for this process alone."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


_started: list["DaemonProcess"] = []


def worker_record(daemon: DaemonProcess, run_id: str, number: int = 1) -> AttemptRecord:
    """Who the worker of an attempt is, by its own word."""
    path = record_path(str(daemon.home.run(run_id).attempts), number)
    return msgspec.json.decode(path.read_bytes(), type=AttemptRecord)


def end_everything(home: Path) -> None:
    """Every process that has to do with that home: daemon, launcher, workers. Also what they start meanwhile."""
    while found := _processes_of(home):
        kill_processes(found)
    for daemon in _started:
        if daemon.home.root == home:
            daemon.process.wait(DEADLINE_S)


def _processes_of(home: Path) -> set[psutil.Process]:
    found = set()
    psutil.process_iter.cache_clear()  # an object of it may stand for an ended process of the same number
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # The command line of one that has ended, and is not reaped yet, is empty.
            if str(home) in " ".join(process.cmdline()) and process.pid != os.getpid():
                found |= {process, *process.children(recursive=True)}
    return found


def kill_processes(processes: Iterable[psutil.Process]) -> int:
    """Kill them; returns how many have ended. It does not wait for orphans to be reaped: init may take seconds for that."""
    fds = []
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(process.pid))
            signal.pidfd_send_signal(fds[-1], signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    num_ended = 0
    for fd in fds:
        ended, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        num_ended += len(ended)
        os.close(fd)
    return num_ended
