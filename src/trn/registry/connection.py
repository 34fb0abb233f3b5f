"""Opening the registry's file: one connection that writes, any number that read."""

import contextlib
import sqlite3
from importlib.resources import files
from pathlib import Path

from trn.core.errors import RegistryError, RegistryGoneError
from trn.core.home import Home
from trn.registry.file_identity import OpenFile

BUSY_TIMEOUT_MS = 30_000
WRITER_BUSY_MS = (
    2_000  # there is one writer: whoever else holds the lock is a stranger, and a loop would wait for them
)


def open_writer(path: Path, *, is_durable: bool = True) -> sqlite3.Connection:
    """The only connection that writes and checkpoints. With `is_durable` a commit is on disk when it returns."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    path.chmod(0o600)
    connection.row_factory = sqlite3.Row
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

    Waits for nobody: while a reader is in the way, the writer has better things to do.
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


def open_reader(path: Path) -> sqlite3.Connection:
    """Read-only; never takes a lock that a writer would wait for."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA query_only = ON")
    return connection


def migrate(connection: sqlite3.Connection, package: str) -> int:
    """Bring an older file to this release's schema, one numbered script after the other, each whole or not at all.

    RegistryError where the file is from a newer release: it may mean things that we do not know.
    """
    scripts = sorted(item.name for item in files(package).iterdir() if item.name.endswith(".sql"))
    newest = int(scripts[-1].partition("_")[0])
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
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


def check_integrity(path: Path) -> list[str]:
    """What SQLite itself finds wrong; empty where all is well. Waits for nobody."""
    try:
        with contextlib.closing(open_reader(path)) as connection:
            found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as fault:  # so damaged that it cannot be looked through
        return [str(fault)]
    return [] if found == ["ok"] else found


def back_up(path: Path, target: Path) -> None:
    """A consistent copy, for the owner alone, while everything goes on."""
    with contextlib.closing(open_reader(path)) as source:
        copy_to(source, target)


def copy_to(source: sqlite3.Connection, target: Path) -> None:
    """A consistent copy of what that connection reads, for the owner alone."""
    target.touch(mode=0o600)
    with contextlib.closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
