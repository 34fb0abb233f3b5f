"""Opening the registry's file: one connection that writes, any number that read.

SQLite writes to the file that it opened, wherever that is by now. A commit into a file that was deleted or replaced is
durable, and lost all the same. So `OpenFile` looks at the path before each commit, and again after it, before the
commit is reported:
- The file and its log (`-wal`) are known by device and inode.
- If only this process writes the file, its size and time of change are known as well: in WAL mode it changes only in a
  checkpoint, and this process makes them all. So a copy over it (`cp backup registry.db`) is noticed, too.
- A time of change alone says little: `touch` sets it. So the checksum of a file that is not large is known, too.
"""

import contextlib
import os
import secrets
import sqlite3
import zlib
from importlib.resources import files
from pathlib import Path

from trn.core.errors import RegistryError, RegistryGoneError
from trn.core.home import Home

BUSY_TIMEOUT_MS = 30_000
MAX_CHECKED_BYTES = 64 << 20  # read in a few hundredths of a second
CHECKED_BLOCK_BYTES = 1 << 20
WRITER_BUSY_MS = 2_000  # there is one writer; another program that holds the lock would block the loop


_Place = tuple[int, int]  # device, inode


class OpenFile:
    """One open database. Not for several threads at once, but any may be the one."""

    def __init__(self, path: Path, *, is_changed_by_checkpoints_alone: bool) -> None:
        """From its connection's thread, once the connection is open."""
        self.path = path
        self._wal = f"{path}-wal"
        self._is_content_known = is_changed_by_checkpoints_alone
        self._place: _Place = (0, 0)
        self._content = (0, 0)  # size, time of change
        self._checksum: int | None = None  # of the content; None: the file is too large to read it for that
        self._wal_place: _Place | None = None  # it is made by the first change
        self.note()

    def note(self) -> None:
        """What is at the path now is the file that is open: after opening it, and after each own checkpoint."""
        found = os.stat(self.path)  # noqa: PTH116  (hot)
        self._place = (found.st_dev, found.st_ino)
        self._content = (found.st_size, found.st_mtime_ns)
        self._checksum = self._find_checksum(found.st_size) if self._is_content_known else None

    def find_problem(self) -> str:
        """Why a commit would not be found again; empty: all is well. Two calls of the system."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  (hot)
        except OSError:
            return f"{self.path} was deleted while the daemon had it open"
        if (found.st_dev, found.st_ino) != self._place:
            return f"{self.path} was replaced by another file while the daemon had it open"
        if self._is_content_known and (found.st_size, found.st_mtime_ns) != self._content:
            if self._checksum is None or self._find_checksum(found.st_size) != self._checksum:
                return f"{self.path} was written by another program while the daemon had it open"
            self._content = (found.st_size, found.st_mtime_ns)
        return self._find_wal_problem()

    def _find_checksum(self, size_bytes: int) -> int | None:
        if size_bytes > MAX_CHECKED_BYTES:
            return None
        checksum = 0
        with self.path.open("rb", buffering=0) as file:
            while block := file.read(CHECKED_BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
        return checksum

    def _find_wal_problem(self) -> str:
        try:
            found = os.stat(self._wal)  # noqa: PTH116  (hot)
        except OSError:
            return "" if self._wal_place is None else f"{self._wal} was deleted while the daemon had it open"
        place = (found.st_dev, found.st_ino)
        if self._wal_place is None:
            self._wal_place = place
        return "" if self._wal_place == place else f"{self._wal} was replaced while the daemon had it open"


Source = Path | str  # a file, or the URI of a database in memory


def memory_source() -> str:
    """A database in memory, of its own; for as long as a connection to it is open."""
    return f"file:trn-{secrets.token_hex(8)}?mode=memory&cache=shared"


class WriterConnection(sqlite3.Connection):
    """The one that writes."""

    last_change: int | None = None  # of the registry, once it is known: see `rows.next_change`


def open_writer(path: Source, *, is_durable: bool = True) -> WriterConnection:
    """The only connection that writes and checkpoints. With `is_durable` a commit is on disk when it returns."""
    connection = sqlite3.connect(
        path,
        isolation_level=None,
        check_same_thread=False,
        factory=WriterConnection,
        cached_statements=256,
        uri=isinstance(path, str),
    )
    connection.row_factory = sqlite3.Row
    if isinstance(path, str):
        connection.execute("PRAGMA foreign_keys = ON")
        return connection
    path.chmod(0o600)
    try:
        for pragma in (
            f"busy_timeout = {WRITER_BUSY_MS}",
            "journal_mode = WAL",
            f"synchronous = {'FULL' if is_durable else 'NORMAL'}",
            "foreign_keys = ON",
            "wal_autocheckpoint = 0",  # maintenance does it, and looks at what comes back
        ):
            connection.execute(f"PRAGMA {pragma}")
    except sqlite3.DatabaseError as fault:
        connection.close()
        raise RegistryError(
            f"{path} cannot be used: {fault}; `{Home(path.parent).check_command}` looks through it, and says how to"
            " put a backup in its place"
        ) from fault
    return connection


def checkpoint(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Bring the log back into the file: (busy, frames in the log, frames checkpointed), as SQLite says.

    Does not wait for readers.
    """
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        row = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {WRITER_BUSY_MS}")
    return row[0], row[1], row[2]


def checkpoint_file(connection: sqlite3.Connection, file: OpenFile) -> tuple[int, int, int]:
    """`checkpoint`, of a file that is still at its path: into another one it would mix the two. RegistryGoneError."""
    problem = file.find_problem()
    if problem:
        raise RegistryGoneError(problem)
    try:
        return checkpoint(connection)
    finally:
        file.note()  # one that failed half way, on a full disk, has changed the file, too


def open_reader(path: Source) -> sqlite3.Connection:
    """Read-only; never takes a lock that a writer would wait for."""
    source = path if isinstance(path, str) else f"{path.absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(source, uri=True, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    if isinstance(
        path, str
    ):  # connections to one memory lock tables against each other, unless they read this way
        connection.execute("PRAGMA read_uncommitted = ON")
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA query_only = ON")
    return connection


def migrate(connection: sqlite3.Connection, package: str) -> int:
    """Bring an older file to this release's schema, one numbered script after the other, each whole or not at all.

    RegistryError where the file is from a newer release: it may mean things that we do not know.
    """
    scripts = _scripts(package)
    newest, version = len(scripts), _version(connection)
    if version > newest:
        raise RegistryError(
            f"the registry has schema {version} and this release knows {newest}: it was written by a newer trn; use that"
            " one, or restore a backup"
        )
    for name in scripts[version:]:
        number = int(name.partition("_")[0])
        script = files(package).joinpath(name).read_text(encoding="utf-8")
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")
        except sqlite3.Error as fault:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise RegistryError(f"migration {name} failed and was taken back: {fault}") from fault
    return newest


def is_older(connection: sqlite3.Connection, package: str) -> bool:
    """The file has the schema of an older release: a daemon has to migrate it first."""
    return _version(connection) < len(_scripts(package))


def _scripts(package: str) -> list[str]:
    """The migrations, numbered from 1."""
    return sorted(item.name for item in files(package).iterdir() if item.name.endswith(".sql"))


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_integrity(path: Path) -> list[str]:
    """What SQLite itself finds wrong; empty if all is well. Does not block others."""
    try:
        with contextlib.closing(open_reader(path)) as connection:
            found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as fault:  # so damaged that it cannot be looked through
        return [str(fault)]
    return [] if found == ["ok"] else found


def back_up(path: Path, target: Path) -> None:
    """A consistent copy, for the owner alone, while others read and write."""
    with contextlib.closing(open_reader(path)) as source:
        copy_to(source, target)


def copy_to(source: sqlite3.Connection, target: Path) -> None:
    """A consistent copy of what that connection reads, for the owner alone."""
    target.touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
