"""Writes the staged image to a file: checksums and hash in one thread, the disk in another."""

import errno
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from gen_worker.contract.files.hashes import PAGE, open_direct
from gen_worker.trainer.checkpoints.files.archive import CrcRecord
from gen_worker.trainer.compute.checksum import crc32

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PIECE = 1 << 20  # checksummed, then hashed, while in the cache
_CHUNK = 4 << 20  # written with one call


class ImageFile:
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
        """Fill in the CRC32s, hash the image, and release each final chunk to the writing thread."""
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
                crc = crc32(self._view[start:stop], crc)
                advance(stop)
            # Both slots come later in the file.
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
            self._fd = open_direct(self._path)
            done = 0
            while (end := self._ready.get()) is not None:
                while done < end:
                    done += self._write_chunk(done, min(end, done + _CHUNK))
            # Direct writes are whole pages.
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
            # The file system refuses direct writes after the open.
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            written = os.pwrite(self._fd, padded, start)
        if written < len(padded):  # full disk: the next call fails, if it begins at a whole page
            written -= written % PAGE
        return min(written, end - start)
