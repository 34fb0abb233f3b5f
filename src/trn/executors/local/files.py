"""Files of runs on this machine, as an executor reads them."""

import os
import stat
from pathlib import Path

import msgspec

from gen_worker.contract.files.regular import open_regular, read_regular
from trn.core.home import Home
from trn.executors.base import AttemptStart

MAX_OFFSET = (1 << 63) - 1  # what the system's own offsets can hold


class LocalFile:
    """A `RunFile`. NotRegularFileError where something else has its place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self) -> int:
        try:
            found = self._path.lstat()
            if not stat.S_ISREG(found.st_mode):
                os.close(open_regular(self._path))
        except FileNotFoundError:
            return 0
        return found.st_size

    def read(self, offset: int, max_bytes: int) -> bytes:
        try:
            descriptor = open_regular(self._path)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, max_bytes, min(offset, MAX_OFFSET - max_bytes))
        finally:
            os.close(descriptor)


class LocalFiles:
    """The `RunFiles` of a home on this machine."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def events(self, run_id: str) -> LocalFile:
        return LocalFile(self._home.run(run_id).events)

    def log(self, run_id: str) -> LocalFile:
        return LocalFile(self._home.run(run_id).log)

    def log_starts(self, run_id: str, offset: int) -> list[AttemptStart]:
        """By the attempts' records: a worker writes its own before it prints."""
        folder = self._home.run(run_id).attempts
        numbers = [int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()]
        starts: list[AttemptStart] = []
        for number in sorted(numbers, reverse=True):
            try:
                start = _decode_record(read_regular(folder / f"{number}.json")).log_offset
            except (OSError, msgspec.MsgspecError):
                continue
            if start is not None:
                starts.append(AttemptStart(start, number))
                if start <= offset:
                    break
        return starts[::-1]


class _AttemptRecord(msgspec.Struct):
    log_offset: int | None = None


_decode_record = msgspec.json.Decoder(_AttemptRecord).decode
