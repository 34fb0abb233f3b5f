"""A file that only grows by whole pieces."""

import os
from pathlib import Path


class AppendedFile:
    """Opened for appending, made where it is not there. What a full disk cut off is taken back."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size_bytes = os.fstat(self._fd).st_size

    def append(self, piece: bytes) -> None:
        left = memoryview(piece)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(piece)

    def cut_half_line(self) -> None:
        """Drop what a crash left after the last newline."""
        end = self.size_bytes
        while end > 0:
            start = max(end - 4096, 0)
            newline = os.pread(self._fd, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < self.size_bytes:
            os.ftruncate(self._fd, end)
            self.size_bytes = end

    def close(self) -> None:
        os.close(self._fd)
