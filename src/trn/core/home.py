"""Where everything is: one folder for all, one folder for each run. Names are made here and nowhere else."""

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gen_worker.contract.job.run_ids import RUN_ID
from trn.core.errors import InvalidRequestError, UnavailableError

# A socket's whole path must fit into 108 bytes, on macOS into 104.
MAX_SOCKET_PATH = 100
LOG_SUFFIX = ".log.jsonl"
FULL = (
    "~"  # `<run>~1.log.jsonl`: a log that was long enough. No run's id has it; `<run>.2` may be another run
)
PROBE = ".probe-"
# Of the disk below us and our rights on it, not of our code.
DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})


def require_run_id(run_id: str) -> None:
    """InvalidRequestError where it could name another place than a run's folder."""
    if not RUN_ID.match(run_id) or ".." in run_id:
        raise InvalidRequestError(
            f"{run_id!r} is no run id: expected 1 to 128 letters, digits, '.', '_' or '-', without '..'"
        )


def find_home(environ: Mapping[str, str] = os.environ) -> Path:
    """`$TRN_HOME`, else the platform's folder for state."""
    if environ.get("TRN_HOME"):
        return Path(environ["TRN_HOME"]).expanduser().absolute()
    from platformdirs import user_state_path

    return Path(user_state_path("trn"))


def socket_address(path: Path) -> str:
    """A name for that socket that is short enough to bind or connect to.

    Where its path is too long, a private folder below the system's temporary one gets a link to its folder. $TMPDIR may
    be too long, too: then it is below /tmp.
    """
    if _fits(path):
        return str(path)
    import hashlib
    import tempfile

    name = Path(f"trn-{os.getuid()}", hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:16])
    links = [Path(folder, name) for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108 - checked below
    link = next((link for link in links if _fits(link / path.name)), links[-1])
    link.parent.mkdir(mode=0o700, exist_ok=True)
    found = link.parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnavailableError(
            f"{path} is too long for a socket, and {link.parent} is not a private folder of yours: set TRN_HOME to a"
            " shorter path"
        )
    with contextlib.suppress(FileExistsError):
        link.symlink_to(path.parent)
    return str(link / path.name)


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_SOCKET_PATH


def _user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Home(NamedTuple):
    """The daemon's folder. It and its socket are the owner's alone."""

    root: Path

    @property
    def registry(self) -> Path:
        return self.root / "registry.db"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.db"

    @property
    def lock(self) -> Path:
        return self.root / "daemon.lock"

    @property
    def socket(self) -> Path:
        return self.root / "daemon.sock"

    @property
    def settings(self) -> Path:
        return self.root / "settings.toml"

    @property
    def daemon_log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def daemon_info(self) -> Path:
        """Who the daemon is and where it listens; only as true as the lock is held."""
        return self.root / "daemon.json"

    @property
    def gateway_info(self) -> Path:
        """Where the gateway listens, and the secret that programs send it."""
        return self.root / "gateway.json"

    @property
    def gateway_port(self) -> Path:
        """The free port that the last gateway took: the next one takes it again, so that links keep their meaning."""
        return self.root / "gateway.port"

    @property
    def gateway_lock(self) -> Path:
        return self.root / "gateway.lock"

    @property
    def gateway_output(self) -> Path:
        """Of its start: why it did not."""
        return self.root / "gateway.out"

    @property
    def gateway_log(self) -> Path:
        return self.root / "gateway.log"

    @property
    def window(self) -> Path:
        """What the window of `trn gui` remembers of its layout."""
        return self.root / "window.ini"

    @property
    def token(self) -> Path:
        """The operator's secret, for connections that do not come through the socket."""
        return self.root / "token"

    @property
    def doorbell(self) -> Path:
        return self.root / "doorbell.sock"

    @property
    def launcher(self) -> Path:
        return self.root / "launcher"

    @property
    def snapshots(self) -> Path:
        return self.root / "snapshots"

    @property
    def models(self) -> Path:
        """What was served or predicted with: see `ModelStore`."""
        return self.root / "models"

    @property
    def trials(self) -> Path:
        """Frozen code, laid out for the moment in which it is tried."""
        return self.root / "trials"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def foreign(self) -> Path:
        """Folders that were in the way of a run and are of another submission."""
        return self.root / "foreign"

    @property
    def trash(self) -> Path:
        """Folders of runs that were removed, until their files are gone."""
        return self.root / "trash"

    @property
    def backups(self) -> Path:
        return self.root / "backups"

    @property
    def checks(self) -> Path:
        """Certificates of trainer classes, a folder for each `trn check`."""
        return self.root / "checks"

    @property
    def logs(self) -> "LogFolder":
        """Every run's lines, for machines."""
        return LogFolder(self.root / "logs")

    def run(self, run_id: str) -> "RunFolder":
        """The folder of one run; an id that could name another place is refused."""
        require_run_id(run_id)
        return RunFolder(self.runs / run_id)

    def make(self) -> None:
        """Create it, closed to others. UnavailableError where it cannot be written, or is another user's."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._require_own()
            for folder in (self.runs, self.launcher):
                folder.mkdir(exist_ok=True, mode=0o700)
            mode = stat.S_IMODE(self.root.stat().st_mode)
            if (
                mode & 0o077
            ):  # others lose their rights; what its owner took from themselves is not given back
                self.root.chmod(mode & 0o700)
            probe = self.root / f"{PROBE}{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink(missing_ok=True)  # another thread of ours may try at the same moment
        except OSError as fault:
            raise self.unwritable(fault) from fault

    def _require_own(self) -> None:
        """Its owner decides what this process runs: that must not be another user. Also for root."""
        files = (self.registry, self.metrics, self.settings, self.token, self.lock)
        folders = (self.runs, self.launcher, self.snapshots, self.models, self.trials, self.checks)
        known = (*files, *folders)
        for path in (self.root, *known):
            try:
                found = path.stat() if path == self.root else path.lstat()
            except FileNotFoundError:
                continue
            if found.st_uid != os.geteuid():
                owner, user = _user_name(found.st_uid), _user_name(os.geteuid())
                raise UnavailableError(
                    f"{path} belongs to user {owner}, and this process runs as {user}: run it as {owner}, set TRN_HOME to"
                    f" a folder of your own, or make it yours (`chown -R {user} {self.root}`)"
                )

    @property
    def check_command(self) -> str:
        """The command that checks the registry and says how to repair it; with this home where it is not the usual one."""
        import shlex

        option = "" if self.root == find_home() else f" --home {shlex.quote(str(self.root))}"
        return f"python -m trn.daemon{option} check"

    def unwritable(self, fault: OSError) -> UnavailableError:
        """What to say where something in it could not be written."""
        place = str(fault.filename or "")
        is_below = place.startswith(f"{self.root}/") and not Path(place).name.startswith(PROBE)
        where = f"{place} in the home {self.root}" if is_below else f"the home {self.root}"
        remedy = "set TRN_HOME to a folder of yours"
        if fault.errno in (errno.EACCES, errno.EPERM):
            remedy = f"give yourself the right to (`chmod -R u+rwX {self.root}`), or {remedy}"
        return UnavailableError(f"{where} cannot be written: {fault.strerror}; {remedy}")


class RunFolder(NamedTuple):
    """All that belongs to one run."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def contract(self) -> Path:
        return self.root / "contract.json"

    @property
    def events(self) -> Path:
        return self.root / "metrics" / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def log(self) -> Path:
        return self.root / "worker.log"

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def attempts(self) -> Path:
        """`<n>.json`: the process of attempt n, made by itself; `<n>.exit.json`: how it ended."""
        return self.root / "attempts"

    @property
    def damaged_events(self) -> Path:
        """Lines of the events file that are no events."""
        return self.root / "metrics" / "events.damaged.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "environment.json"

    @property
    def serving(self) -> Path:
        """By which a daemon and a model server agree on what is served."""
        return self.root / "serving"


class LogFolder(NamedTuple):
    """Lines of runs for machines, by the UTC day on which they were written: the home's, or that of a `--log-dir`."""

    root: Path

    @property
    def jobs_index(self) -> Path:
        """A line when a run is accepted, and one when it has ended."""
        return self.root / "jobs" / "index.jsonl"

    def day(self, at_ms: int) -> Path:
        import time

        return self.root / time.strftime("%Y/%m/%d", time.gmtime(at_ms // 1000))

    def run(self, run_id: str, at_ms: int) -> Path:
        """The file that the run's lines go to on that day."""
        require_run_id(run_id)
        return self.day(at_ms) / f"{run_id}{LOG_SUFFIX}"
