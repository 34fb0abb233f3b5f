"""SHA-256 of bytes and of files, written as `sha256:<hex>`."""

import errno
import hashlib
import mmap
import os
from pathlib import Path

from gen_worker.contract.files.regular import open_regular

PAGE = 4096
_CHUNK = 4 << 20  # read with one call


def hash_bytes(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def hash_file(path: Path | str, *, follow: bool = True, from_disk: bool = False) -> str:
    """Hash a regular file. `from_disk` reads past the page cache, where the system can."""
    fd = open_direct(path, os.O_RDONLY) if from_disk else open_regular(path, follow=follow)
    try:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what was written without direct access
        return hash_descriptor(fd)
    finally:
        os.close(fd)


def hash_descriptor(fd: int) -> str:
    """Of an open regular file, from its start; its position does not matter and does not move."""
    digest = hashlib.sha256()
    size = os.fstat(fd).st_size
    position = 0
    pages_bytes = min(_CHUNK, -(-max(size, 1) // PAGE) * PAGE)  # direct reading wants whole pages
    with mmap.mmap(-1, pages_bytes) as buffer, memoryview(buffer) as view:
        # Up to the size, not to the end of file: a direct read at an odd offset is an error for some.
        while position < size and (count := os.preadv(fd, [buffer], position)):
            digest.update(view[:count])
            position += count
    return "sha256:" + digest.hexdigest()


def open_direct(path: Path | str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """A descriptor that bypasses the page cache: no second copy of the bytes, and reads come from the disk."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
