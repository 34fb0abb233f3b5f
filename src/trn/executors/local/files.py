"""Files of runs on this machine, as an executor reads them."""

import os
import stat
from pathlib import Path

from gen_worker.contract.files.regular import open_regular

MAX_OFFSET = (1 << 63) - 1  # what the system's own offsets can hold


class LocalFile:
    """A `RunFile`. What stands there and is no regular file is an OSError, and has no size."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def size(self) -> int:
        try:
            found = self._path.lstat()
        except OSError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def read(self, offset: int, max_bytes: int) -> bytes:
        try:
            descriptor = open_regular(self._path)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, max_bytes, min(offset, MAX_OFFSET - max_bytes))
        finally:
            os.close(descriptor)
