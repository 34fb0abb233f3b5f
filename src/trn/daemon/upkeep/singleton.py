"""One daemon for a home: a lock that the system takes back when its holder dies, and a note of who that is."""

import msgspec
from filelock import FileLock, Timeout

from gen_worker.contract.durable_files import replace_file
from trn.core.errors import AlreadyRunningError, UnavailableError
from trn.core.home import Home


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who the daemon is and where it listens."""

    pid: int
    version: str
    addresses: tuple[str, ...]
    started_ms: int
    event_bus: str = ""  # as it may be shown
    source_dir: str = ""  # where its code is, and the stamp of that when it started
    source_stamp: str = ""


def read_daemon_info(home: Home) -> DaemonInfo | None:
    """What the last daemon wrote of itself; it may be gone since."""
    try:
        return msgspec.json.decode(home.daemon_info.read_bytes(), type=DaemonInfo)
    except (OSError, msgspec.MsgspecError):
        return None


class Singleton:
    """Held from `acquire` to `release`, or to the end of the process."""

    def __init__(self, home: Home) -> None:
        self._home = home
        # thread_local: whoever shuts the daemon down may be another thread than the one that started it.
        self._lock = FileLock(home.lock, timeout=0, thread_local=False, mode=0o600)

    def acquire(self) -> None:
        """AlreadyRunningError, with its pid and address, where another daemon lives."""
        try:
            self._lock.acquire()
        except Timeout:
            other = read_daemon_info(self._home)
            who = "" if other is None else f", pid {other.pid}, at {', '.join(other.addresses)}"
            raise AlreadyRunningError(
                f"another daemon has {self._home.root}{who}: use that one, stop it, or set TRN_HOME to another folder"
            ) from None
        except OSError as fault:
            raise UnavailableError(f"{self._home.lock} cannot be locked: {fault.strerror}") from fault

    def announce(self, info: DaemonInfo) -> None:
        """Tell others where to find this daemon. Call once it answers there."""
        replace_file(self._home.daemon_info, msgspec.json.encode(info), sync="none", mode=0o600)

    def release(self) -> None:
        self._home.daemon_info.unlink(missing_ok=True)
        self._lock.release()
