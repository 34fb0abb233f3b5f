"""The daemon of a home: find the one that runs, or start one."""

import contextlib
import json
import socket
import struct
from typing import NamedTuple

from gen_worker.contract.installed_packages import source_stamp
from gen_worker.contract.process_identity import is_process_alive, read_command, read_process
from trn.client.background_start import START_PATIENCE_S, Program, ensure_running
from trn.core.bus_url import EVENT_BUS_VARIABLE
from trn.core.home import Home, socket_address
from trn.core.version import CHANGED, SOURCES, VERSION

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
    http: str = ""  # the address at which it keeps the page

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
            http=str(said.get("http", "")),
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
    home: Home,
    *,
    idle_exit_s: float | None = None,
    event_bus: str = "",
    http: str = "",
    patience_s: float = START_PATIENCE_S,
) -> tuple[RunningDaemon, bool]:
    """(the home's daemon, whether it was started here). Blocks until it answers.

    One that is started here exits after `idle_exit_s` without runs and calls, publishes to `event_bus`, and keeps the
    page at the address `http`. UnavailableError, with the daemon's own message, if it refuses to start.
    """
    arguments = ["serve", "--quiet"]
    if idle_exit_s is not None:
        arguments += ["--idle-exit-s", f"{idle_exit_s:g}"]
    if http:
        arguments += ["--http", http]
    program = Program(
        name="daemon",
        module="trn.daemon",
        arguments=arguments,
        find=lambda: find_daemon(home),
        output=home.root / OUTPUT_NAME,
        lock=home.root / START_LOCK_NAME,
        log=home.daemon_log,
        variables={EVENT_BUS_VARIABLE: event_bus} if event_bus else {},
    )
    return ensure_running(program, home, patience_s=patience_s)


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
