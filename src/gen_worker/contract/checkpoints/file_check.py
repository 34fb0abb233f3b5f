"""Are the files of a checkpoint what was saved? Sizes and hashes, by its meta. Needs neither torch nor numpy."""

import errno
import hashlib
import mmap
import os
from pathlib import Path

from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry
from gen_worker.contract.regular_files import open_regular
from gen_worker.errors import CheckpointError

PAGE = 4096
_CHUNK = 4 << 20  # read with one call


def check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    if size != entry.size_bytes:
        what = "truncated" if size < entry.size_bytes else "too long"
        raise CheckpointError(f"{entry.name} is {what}: {size} bytes, its meta says {entry.size_bytes}")


def check_file(path: Path, entry: FileEntry, *, from_disk: bool = False) -> None:
    """Size and hash, or CheckpointError."""
    check_size(path, entry)
    try:
        found = hash_file(path, from_disk=from_disk)
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    compare_hash(entry, found)


def compare_hash(entry: FileEntry, found: str) -> None:
    if found != entry.hash:
        raise CheckpointError(f"hash mismatch: {entry.name} is {found}, its meta says {entry.hash}")


def is_intact(folder: Path, meta: CheckpointMeta) -> bool:
    """Whether every file of the checkpoint is there and matches its hash."""
    try:
        for entry in meta.files:
            check_file(folder / entry.name, entry)
    except CheckpointError:
        return False
    return True


def hash_file(path: Path, *, from_disk: bool = False) -> str:
    """`sha256:<hex>` of a file; `from_disk` asks the disk rather than the page cache, where that is possible."""
    digest = hashlib.sha256()
    fd = open_direct(path, os.O_RDONLY) if from_disk else open_regular(path, follow=True)
    try:
        size = os.fstat(fd).st_size
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what was written without direct access
        position = 0
        pages_bytes = min(_CHUNK, -(-max(size, 1) // PAGE) * PAGE)  # direct reading wants whole pages
        with mmap.mmap(-1, pages_bytes) as buffer, memoryview(buffer) as view:
            # Up to the size, not to the end of file: a direct read at an odd offset is an error for some.
            while position < size and (count := os.preadv(fd, [buffer], position)):
                digest.update(view[:count])
                position += count
    finally:
        os.close(fd)
    return "sha256:" + digest.hexdigest()


def open_direct(path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """Past the page cache: spares a copy of all bytes, leaves the cache to the data, and asks the disk itself."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
