"""The daemon of a home: find the one that runs, or start one.

A process that starts one holds a lock meanwhile; others wait for it, so ten at once start one. The daemon's own lock
decides if two are started all the same.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gen_worker.contract.installed_packages import source_stamp
from gen_worker.contract.process_identity import is_process_alive, read_command, read_process
from trn.core.bus_url import EVENT_BUS_VARIABLE
from trn.core.errors import AlreadyRunningError, UnavailableError
from trn.core.home import Home, socket_address
from trn.core.variables import without_workers_variables
from trn.core.version import CHANGED, SOURCES, VERSION

START_PATIENCE_S = 60.0
LOOK_EVERY_S = 0.02
GAVE_WAY_S = 0.5  # before another is started beside one that holds the home and does not answer yet
MAX_OUTPUT_BYTES = 1 << 20
OUTPUT_NAME, START_LOCK_NAME = "daemon.out", "daemon-start.lock"


class RunningDaemon(NamedTuple):
    """A daemon that listens, from its `daemon.json`."""

    pid: int
    version: str
    addresses: tuple[str, ...]
    started_ms: int
    event_bus: str = ""  # as it may be shown
    source_dir: str = ""  # where its code is, and the stamp of that when it started
    source_stamp: str = ""

    @property
    def version_warning(self) -> str:
        """The warning for a daemon of another version, or whose code has changed; empty if it matches."""
        if self.version == VERSION:
            return CHANGED if self._has_changed() else ""
        return (
            f"the daemon is trn {self.version} and this is trn {VERSION}: `trn daemon stop` and"
            " `trn daemon start` update it; runs continue meanwhile"
        )

    def _has_changed(self) -> bool:
        if not self.source_stamp or self.source_dir != str(
            SOURCES[0]
        ):  # it does not say, or is another install
            return False
        try:
            return self.source_stamp != source_stamp(*SOURCES)
        except OSError:  # they are being replaced just now
            return True


def find_daemon(home: Home) -> RunningDaemon | None:
    """The home's daemon, if it listens now. Files of a dead one are ignored."""
    listener = _listener(home)
    if listener is None:
        return None
    try:
        said = json.loads(home.daemon_info.read_bytes())
        daemon = RunningDaemon(
            pid=int(said["pid"]),
            version=str(said["version"]),
            addresses=tuple(map(str, said["addresses"])),
            started_ms=int(said["started_ms"]),
            event_bus=str(said.get("event_bus", "")),
            source_dir=str(said.get("source_dir", "")),
            source_stamp=str(said.get("source_stamp", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is just starting or stopping
    return daemon if listener in (0, daemon.pid) else None


def is_ending(home: Home) -> bool:
    """Whether the home's daemon is stopping: it lives, but no longer listens."""
    try:
        pid = int(json.loads(home.daemon_info.read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return is_process_alive(pid) and is_daemon(pid)


def is_daemon(pid: int) -> bool:
    """By its command line, if the system shows it."""
    command = read_command(pid)
    return command is None or b"trn.daemon" in command


def name_start(home: Home) -> str:
    """The command that starts a daemon there."""
    from trn.core.home import find_home

    return "trn daemon start" if home.root == find_home() else f"trn --home {home.root} daemon start"


def silence_of(daemon: RunningDaemon) -> tuple[str, str]:
    """(what is wrong, what to do) for a daemon that listens but does not answer."""
    who = f"the daemon, pid {daemon.pid},"
    state = None
    with contextlib.suppress(OSError):
        state = read_process(daemon.pid)
    if state is not None and state.letter in ("T", "t"):
        return f"{who} is suspended", f"`kill -CONT {daemon.pid}` resumes it"
    return f"{who} does not answer", "`trn daemon stop`, then `trn daemon start`"


def ensure_daemon(
    home: Home, *, idle_exit_s: float | None = None, event_bus: str = "", patience_s: float = START_PATIENCE_S
) -> tuple[RunningDaemon, bool]:
    """(the home's daemon, whether it was started here). Blocks until it answers.

    One that is started here exits after `idle_exit_s` without runs and calls, and publishes to `event_bus`.
    UnavailableError, with the daemon's own message, if it refuses to start.
    """
    found = find_daemon(home)
    if found is not None:
        return found, False
    home.make()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with _start_lock(home) as is_held:
            found = find_daemon(home)
            if found is not None:
                return found, False
            started = _start(home, idle_exit_s, event_bus, deadline) if is_held else None
            if started is not None:
                return started
        time.sleep(GAVE_WAY_S if is_held else LOOK_EVERY_S)
    raise UnavailableError(
        f"no daemon of {home.root} answers after {patience_s:g} s: see {home.daemon_log} and"
        f" {home.root / OUTPUT_NAME}"
    )


def _start(
    home: Home, idle_exit_s: float | None, event_bus: str, deadline: float
) -> tuple[RunningDaemon, bool] | None:
    """None if it gave way to another one."""
    path = home.root / OUTPUT_NAME
    process, begin = _spawn(home, path, idle_exit_s, event_bus)
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        found = find_daemon(home)
        if found is not None:
            # A caller that lives long, such as a notebook, must reap it later.
            threading.Thread(target=process.wait, name="daemon-reaper", daemon=True).start()
            return found, found.pid == process.pid
        if is_over:
            if process.returncode == AlreadyRunningError.daemon_exit_code:
                return None  # wait for that one
            raise UnavailableError(_refusal(_read_from(path, begin), home, process.returncode))
        time.sleep(LOOK_EVERY_S)
    process.kill()  # a daemon may be killed at any moment
    process.wait()
    return None


def _spawn(
    home: Home, path: Path, idle_exit_s: float | None, event_bus: str
) -> "tuple[subprocess.Popen[bytes], int]":
    # -P: do not import modules from the current folder.
    command = [sys.executable, "-P", "-m", "trn.daemon", "--home", str(home.root), "serve", "--quiet"]
    if idle_exit_s is not None:
        command += ["--idle-exit-s", f"{idle_exit_s:g}"]
    environ = without_workers_variables(os.environ)
    if event_bus:
        environ = {**environ, EVENT_BUS_VARIABLE: event_bus}
    try:
        with path.open("ab") as file:
            if path.stat().st_size > MAX_OUTPUT_BYTES:  # the daemon's log has it all
                file.truncate(0)
            begin = path.stat().st_size
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=home.root,
                env=environ,
                start_new_session=True,
            )
            return process, begin
    except OSError as fault:
        if fault.filename == str(path):
            raise home.unwritable(fault) from fault
        raise UnavailableError(f"no daemon can be started: {fault}") from fault


def _listener(home: Home) -> int | None:
    """The pid that listens at the home's socket, 0 if the system does not tell it; None if there is none."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(socket_address(home.socket))
            if not hasattr(socket, "SO_PEERCRED"):
                return 0
            size = struct.calcsize("3i")
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            return int(pid)
    except OSError:
        return None


@contextlib.contextmanager
def _start_lock(home: Home) -> Iterator[bool]:
    """Whether we hold it: its holder starts a daemon, the others wait for that one."""
    import fcntl

    try:
        file = (home.root / START_LOCK_NAME).open("ab")
    except OSError as fault:
        raise home.unwritable(fault) from fault
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            is_held = False
        yield is_held


def _read_from(path: Path, begin: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        return file.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    return ""


def _refusal(said: str, home: Home, exit_code: int) -> str:
    """The daemon's own message, which begins with `trn: `; else its last line."""
    _, mark, words = said.rpartition("trn: ")
    if mark and words.strip():
        return words.strip()
    import shutil

    from gen_worker.contract.sizes import show_bytes

    free_bytes = shutil.disk_usage(home.root).free
    if not said.strip() and free_bytes < MAX_OUTPUT_BYTES:
        return f"the daemon did not start: {home.root} has {show_bytes(free_bytes)} free, too little even for an error message"
    last = (said.strip().splitlines() or ["no output"])[-1]
    return f"the daemon exited with {exit_code} instead of starting: {last}; see {home.daemon_log}"
