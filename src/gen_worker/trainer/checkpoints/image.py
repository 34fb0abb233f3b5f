"""From the staged image to a file on disk: checksums, hash and writing overlap, one thread each."""

import errno
import hashlib
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from gen_worker.trainer.checkpoints.archive import CrcRecord
from gen_worker.trainer.checkpoints.staging import PAGE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PIECE = 1 << 20  # checksummed, then hashed, while in the cache
_CHUNK = 4 << 20  # written with one call


class ImageWriter:
    """Writes `image` to a new file. `hash` computes while a thread writes what is final; `finish` joins it."""

    def __init__(self, image: Bytes, size_bytes: int, path: Path) -> None:
        self._image = image
        self._view = memoryview(image.data)
        self._size_bytes = size_bytes
        self._path = path
        self._ready: SimpleQueue[int | None] = SimpleQueue()
        self._error: OSError | None = None
        self._fd = -1
        self._thread = Thread(target=self._write, name="checkpoint-write", daemon=True)
        self._thread.start()

    def hash(self, crcs: Sequence[CrcRecord]) -> str:
        """Fill in the CRC32s, hash the image, and let the thread write each chunk as it becomes final."""
        digest = hashlib.sha256()
        position = published = 0

        def advance(end: int) -> None:
            nonlocal position, published
            digest.update(self._view[position:end])
            position = end
            if position - published >= _CHUNK:
                published = position // _CHUNK * _CHUNK
                self._ready.put(published)

        for record in sorted(crcs, key=lambda item: item.offset):
            advance(record.offset)
            crc = 0
            end = record.offset + record.size_bytes
            for start in range(record.offset, end, _PIECE):
                stop = min(start + _PIECE, end)
                crc = zlib.crc32(self._view[start:stop], crc)
                advance(stop)
            # Both slots are still ahead: right after the data, and in the directory at the file's end.
            for slot in (record.descriptor_slot, record.directory_slot):
                self._view[slot : slot + 4] = crc.to_bytes(4, "little")
            if self._error is not None:
                break
        while position < self._size_bytes and self._error is None:
            advance(min(position + _PIECE, self._size_bytes))
        self._ready.put(self._size_bytes)
        return "sha256:" + digest.hexdigest()

    def finish(self) -> int:
        """Wait until all is written; the open descriptor, not yet synced. Raises the thread's OSError."""
        self._ready.put(None)
        self._thread.join()
        if self._error is not None:
            self.close()
            raise self._error
        return self._fd

    def close(self) -> None:
        self._ready.put(None)
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        try:
            self._fd = _open_direct(self._path)
            done = 0
            while (end := self._ready.get()) is not None:
                while done < end:
                    done += self._write_chunk(done, min(end, done + _CHUNK))
            # Whole pages were written, as direct writing asks for.
            os.ftruncate(self._fd, self._size_bytes)
        except OSError as error:
            self._error = error

    def _write_chunk(self, start: int, end: int) -> int:
        padded = self._view[start : -(-end // PAGE) * PAGE]
        try:
            written = os.pwrite(self._fd, padded, start)
        except OSError as error:
            if error.errno != errno.EINVAL or start:
                raise
            # The file system opened it for direct writing but does not do it.
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            written = os.pwrite(self._fd, padded, start)
        if written < len(
            padded
        ):  # a full disk takes what fits; the next call says so, if it begins at a whole page
            written -= written % PAGE
        return min(written, end - start)


def _open_direct(path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> int:
    """Past the page cache: spares a copy of all bytes, leaves the cache to the data, and asks the disk itself."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)


def hash_file(path: Path, *, from_disk: bool = False) -> str:
    """`sha256:<hex>` of a file; `from_disk` asks the disk rather than the page cache, where that is possible."""
    digest = hashlib.sha256()
    fd = _open_direct(path, os.O_RDONLY) if from_disk else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


def make_folder(path: Path) -> None:
    """Create a folder and its parents so that they survive a power cut, as what is synced in them does."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
