"""Append-only files of frames. A frame counts once it is whole: after a crash a half one at the end is cut off.

A file has a number in its name, and the one with the highest number is written to. A frame whose bytes were changed by the
disk is passed over; those after it count.
"""

import logging
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gen_worker.contract.files.regular import open_regular
from gen_worker.inference.frames import Buffer

logger = logging.getLogger("gen_worker.inference")

SUFFIX = ".log"
DAMAGED = ".damaged"  # what could not be read is kept under its name and this
MAX_PIECES = 512  # of one call; systems take 1024
_HEAD = struct.Struct("<II")  # length and CRC of the body
_NAME = re.compile(r"(\d{8})\.[a-z]+")


def numbered(folder: Path, number: int, suffix: str = SUFFIX) -> Path:
    return folder / f"{number:08d}{suffix}"


def list_numbers(folder: Path, suffix: str = SUFFIX) -> list[int]:
    """Of the files with that suffix, in their order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob(f"*{suffix}"))
    return sorted(int(match[1]) for match in matches if match is not None)


def set_aside(path: Path) -> Path:
    """Give a file that cannot be read another name, under which nothing looks for it. Whatever it is."""
    place = path.with_name(f"{path.name}{DAMAGED}")
    number = 1
    while os.path.lexists(place):
        number += 1
        place = path.with_name(f"{path.name}{DAMAGED}-{number}")
    path.rename(place)
    return place


def make_frame(pieces: Sequence[Buffer]) -> list[Buffer]:
    """To be written with one call. A frame has at least one byte: zeros, which a power cut may leave, are no frame."""
    size, check = 0, 0
    for piece in pieces:
        size += len(piece)
        check = zlib.crc32(piece, check)
    return [_HEAD.pack(size, check), *pieces]


class JournalFile:
    """One file. Appending and reading may be in different threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.size = os.fstat(self.fd).st_size

    def append(self, pieces: Sequence[Buffer]) -> int:
        """Write a frame and return its offset. OSError, and nothing is added, where the disk refuses. Not synced."""
        frame = make_frame(pieces)
        wanted = _HEAD.size + sum(len(piece) for piece in pieces)
        offset = self.size
        try:
            written = os.writev(self.fd, frame[:MAX_PIECES])
            if written < wanted:
                rest = memoryview(b"".join(frame))
                while written < wanted:
                    written += os.write(self.fd, rest[written:])
        except OSError:
            os.ftruncate(self.fd, offset)
            raise
        self.size += wanted
        return offset

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def read(self, offset: int) -> memoryview | None:
        """The body of the frame at that offset; None where there is no whole one."""
        head = os.pread(self.fd, _HEAD.size, offset)
        if len(head) < _HEAD.size:
            return None
        size, check = _HEAD.unpack(head)
        if not 0 < size <= self.size - offset - _HEAD.size:  # before memory is taken for it
            return None
        body = os.pread(self.fd, size, offset + _HEAD.size)
        if len(body) < size or zlib.crc32(body) != check:
            return None
        return memoryview(body)

    def frames(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, body) of each whole frame from the start."""
        offset = 0
        while (end := self._end_of(offset)) is not None:
            if (body := self.read(offset)) is not None:
                yield offset, body
            offset = end

    def cut_tail(self, *, keeps: bool = False) -> None:
        """Drop what follows the last whole frame: a crash left it. `keeps` a copy of a file that has bytes of no frame."""
        end = num_damaged = 0
        for offset, body in self.frames():
            num_damaged += offset - end
            end = offset + _HEAD.size + len(body)
        copy = self.path.with_name(f"{self.path.name}{DAMAGED}")
        if keeps and (num_damaged or end < self.size) and not os.path.lexists(copy):
            shutil.copyfile(self.path, copy)
        if num_damaged:
            logger.error("%s: %d bytes were damaged by the disk", self.path, num_damaged)
        if end < self.size:
            logger.warning("%s: dropped %d bytes after the last whole frame", self.path, self.size - end)
            self.cut_to(end)

    def _end_of(self, offset: int) -> int | None:
        """Of the frame at that offset, by its length alone; None where it has none that fits the file."""
        head = os.pread(self.fd, _HEAD.size, offset)
        if len(head) < _HEAD.size:
            return None
        size, _ = _HEAD.unpack(head)
        end: int = offset + _HEAD.size + size
        return end if size and end <= self.size else None

    def cut_to(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        self.size = size

    def close(self) -> None:
        os.close(self.fd)
