"""SHA-256 of bytes and of files, written as `sha256:<hex>`."""

import errno
import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from gen_worker.contract.files.regular import open_regular

PAGE = 4096
_CHUNK = 4 << 20  # read with one call


def hash_bytes(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def hash_file(path: Path | str, *, follow: bool = True, from_disk: bool = False) -> str:
    """Hash a regular file. `from_disk` reads past the page cache, where the system can."""
    fd = open_on_disk(path) if from_disk else open_regular(path, follow=follow)
    try:
        return hash_descriptor(fd)
    finally:
        os.close(fd)


def hash_descriptor(fd: int) -> str:
    """Of an open regular file, from its start; its position does not matter and does not move."""
    digest = hashlib.sha256()
    for chunk in read_chunks(fd):
        digest.update(chunk)
    return "sha256:" + digest.hexdigest()


def read_chunks(fd: int) -> Iterator[memoryview]:
    """An open file from its start, in one kept buffer: a chunk is valid until the next."""
    size = os.fstat(fd).st_size
    position = 0
    buffer = mmap.mmap(-1, min(_CHUNK, -(-max(size, 1) // PAGE) * PAGE))  # direct reading wants whole pages
    view = memoryview(buffer)
    # Up to the size, not to the end of file: a direct read at an odd offset is an error for some.
    while position < size and (count := os.preadv(fd, [buffer], position)):
        yield view[:count]
        position += count


def open_on_disk(path: Path | str) -> int:
    """A descriptor to read what is on the disk, past the page cache where the system can."""
    fd = open_direct(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what was written without direct access
    return fd


def open_direct(path: Path | str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """A descriptor that bypasses the page cache: no second copy of the bytes, and reads come from the disk."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
