"""Writing files whole, and making them durable: a temporary name, a sync, a rename, a sync of the folder.

A reader sees the old content or the new one, never a part. `sync` says what a power cut may do to a new file:
`none`: it may be empty; `file`: the old or the new content is there; `folder`: the new content is there.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

Sync = Literal["none", "file", "folder"]


def sync_path(path: Path | str) -> None:
    """Make a file's content, or a folder's names, survive a power cut. A file system that cannot sync it is no error."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as fault:
        if fault.errno not in (errno.EINVAL, errno.EROFS):  # not supported for folders; nothing to write
            raise
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    if path.is_dir():
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


@contextlib.contextmanager
def replacing(path: Path, *, sync: Sync = "folder", mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A new file that gets the name `path` when the block ends. On an error it is deleted, and `path` is as it was."""
    temporary = temporary_path(path)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            if sync != "none":
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync == "folder":
        sync_path(path.parent)


def replace_file(path: Path, content: bytes, *, sync: Sync = "folder", mode: int = 0o666) -> None:
    with replacing(path, sync=sync, mode=mode) as file:
        file.write(content)


def create_file(path: Path, content: bytes, *, mode: int = 0o600) -> bool:
    """Write a new file; False where `path` exists already. Of several processes, one succeeds. Its content is synced."""
    temporary = temporary_path(path)
    try:
        with _create(temporary, mode) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def temporary_path(path: Path) -> Path:
    """A hidden name beside `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Delete the `temporary_path`s of files of that name in a folder that no other process writes into: theirs was killed.

    What is no file, or cannot be deleted, stays: it is in nobody's way.
    """
    for path in folder.glob(f".{name}.*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def _create(path: Path, mode: int) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b")
