"""One daemon per home: a file lock, which the system releases when the process exits, and a file with its address."""

import contextlib

import msgspec
from filelock import FileLock, Timeout

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replace_file
from trn.core.errors import AlreadyRunningError, UnavailableError
from trn.core.home import PROBE, Home


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon's process, version and addresses."""

    pid: int
    version: str
    addresses: tuple[str, ...]
    started_ms: int
    event_bus: str = ""  # without secrets
    source_dir: str = ""  # of its code; the stamp is from the start
    source_stamp: str = ""
    http: str = ""  # where it keeps the page


def read_daemon_info(home: Home) -> DaemonInfo | None:
    """What the last daemon wrote; it may have exited since."""
    try:
        return msgspec.json.decode(home.daemon_info.read_bytes(), type=DaemonInfo)
    except (OSError, msgspec.MsgspecError):
        return None


class Singleton:
    """Held from `acquire` to `release`, or to the end of the process."""

    def __init__(self, home: Home) -> None:
        self._home = home
        # thread_local=False: another thread may release it.
        self._lock = FileLock(home.lock, timeout=0, thread_local=False, mode=0o600)

    def acquire(self) -> None:
        """AlreadyRunningError, with pid and address, if another daemon runs."""
        try:
            self._lock.acquire()
        except Timeout:
            other = read_daemon_info(self._home)
            who = "" if other is None else f", pid {other.pid}, at {', '.join(other.addresses)}"
            raise AlreadyRunningError(
                f"another daemon runs for {self._home.root}{who}: use it, stop it, or set TRN_HOME to another folder"
            ) from None
        except OSError as fault:
            raise UnavailableError(f"{self._home.lock} cannot be locked: {fault.strerror}") from fault
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Temporary files of processes that were killed before they renamed or deleted them."""
        for pattern in (f".{self._home.daemon_info.name}.*", f"{PROBE}*"):
            for path in self._home.root.glob(pattern):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def announce(self, info: DaemonInfo) -> None:
        """Publish this daemon's address. Call once it answers there. UnavailableError where that cannot be written."""
        path = self._home.daemon_info
        try:
            failpoint("daemon.announce")
            replace_file(path, msgspec.json.encode(info), sync="none", mode=0o600)
        except OSError as fault:
            raise UnavailableError(f"{path} cannot be written: {fault.strerror}") from fault

    def release(self) -> None:
        self._home.daemon_info.unlink(missing_ok=True)
        self._lock.release()
