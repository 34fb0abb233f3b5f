"""Writes the staged image to a file, and compares the file with it. Three threads share the work of a write.

The hash takes longest, so nothing else is done in its thread: another fills in the checksums and looks for non-finite
values, a third writes what is final.
"""

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from gen_worker.contract.files.hashes import PAGE, open_direct, open_on_disk, read_chunks
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.files.archive import CrcRecord
from gen_worker.trainer.checkpoints.files.finite_scan import find_non_finite
from gen_worker.trainer.checkpoints.files.format import FloatRange
from gen_worker.trainer.compute.checksum import crc32

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = 4 << 20  # checksummed, handed on, hashed and written with one call


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the file, from the end of the one before to `stop`, and its CRC-32."""

    stop: int
    crc: int


class ImageFile:
    """Writes `image` to a new file. `hash` computes while a thread writes what is final; `finish` joins it."""

    def __init__(
        self,
        image: Bytes,
        size_bytes: int,
        path: Path,
        crcs: Sequence[CrcRecord] = (),
        floats: Sequence[FloatRange] = (),
    ) -> None:
        self.stretches: list[Stretch] = []  # all of them after `hash`
        self.non_finite: list[str] = []  # names of these tensors, after `finish`
        self._image = image
        self._view = memoryview(image.data)
        self._size_bytes = size_bytes
        self._path = path
        self._crcs = sorted(crcs, key=lambda item: item.offset)
        self._floats = floats
        self._to_hash: SimpleQueue[int | None] = SimpleQueue()  # the end of what is final
        self._to_write: SimpleQueue[int | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._fd = -1
        self._checker = Thread(target=self._check, name="checkpoint-check", daemon=True)
        self._writer = Thread(target=self._write, name="checkpoint-write", daemon=True)
        self._checker.start()
        self._writer.start()

    def hash(self) -> str:
        """Hash the image as the checksums are filled in."""
        digest = hashlib.sha256()
        position = 0
        while (end := self._to_hash.get()) is not None and self._error is None:
            for start in range(position, end, _CHUNK):
                digest.update(self._view[start : min(start + _CHUNK, end)])
            position = end
        return "sha256:" + digest.hexdigest()

    def finish(self) -> int:
        """Wait until all is checked and written; the open descriptor, not yet synced. Raises what the threads raised."""
        self._join()
        if self._error is not None:
            self.close()
            raise self._error
        return self._fd

    def close(self) -> None:
        self._join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _join(self) -> None:
        self._checker.join()
        self._writer.join()

    def _check(self) -> None:
        try:
            published = 0
            for start, stop, record in _split(self._crcs, self._size_bytes):
                crc = 0
                for at in range(start, stop, _CHUNK):
                    end = min(at + _CHUNK, stop)
                    crc = crc32(self._view[at:end], crc)
                    if end - published >= _CHUNK and end < self._size_bytes:
                        published = end // _CHUNK * _CHUNK
                        self._to_hash.put(published)
                        self._to_write.put(published)
                if record is not None:  # both slots come later in the file
                    for slot in (record.descriptor_slot, record.directory_slot):
                        self._view[slot : slot + 4] = crc.to_bytes(4, "little")
                self.stretches.append(Stretch(stop, crc))
                if self._error is not None:
                    return
            self._to_hash.put(self._size_bytes)
            self._to_write.put(self._size_bytes)
            self._to_hash.put(None)
            self.non_finite = find_non_finite(self._image, self._floats)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._to_hash.put(None)
            self._to_write.put(None)

    def _write(self) -> None:
        try:
            self._fd = open_direct(self._path)
            done = 0
            while (end := self._to_write.get()) is not None:
                while done < end:
                    done += self._write_chunk(done, min(end, done + _CHUNK))
            # Direct writes are whole pages.
            os.ftruncate(self._fd, self._size_bytes)
        except OSError as error:
            self._error = self._error or error

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


def _split(crcs: Sequence[CrcRecord], size_bytes: int) -> Iterator[tuple[int, int, CrcRecord | None]]:
    """The file as records and what is between them: (start, stop, record)."""
    position = 0
    for record in crcs:
        if position < record.offset:
            yield position, record.offset, None
        position = record.offset + record.size_bytes
        yield record.offset, position, record
    if position < size_bytes:
        yield position, size_bytes, None


def compare_with_disk(path: Path, stretches: Sequence[Stretch]) -> None:
    """Read the file from the disk; CheckpointError where it is not what was written.

    By the checksums that were taken together with the hash: they need a fifteenth of its time.
    """
    found = [0] * len(stretches)
    position = number = 0
    fd = open_on_disk(path)
    try:
        for chunk in read_chunks(fd):
            at = 0
            while at < len(chunk) and number < len(stretches):
                stop = stretches[number].stop
                taken = min(len(chunk) - at, stop - position)
                found[number] = crc32(chunk[at : at + taken], found[number])
                at, position = at + taken, position + taken
                number += position == stop
    finally:
        os.close(fd)
    start = 0
    for stretch, crc in zip(stretches, found, strict=True):
        if crc != stretch.crc:
            raise CheckpointError(
                f"{path.name}: bytes {start} to {stretch.stop} have the checksum {crc:08x}, written were {stretch.crc:08x}"
            )
        start = stretch.stop
