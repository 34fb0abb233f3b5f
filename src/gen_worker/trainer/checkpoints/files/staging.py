"""The buffer that trainer and writer share: an anonymous file (memfd on Linux, an unlinked file elsewhere).

The writer inherits its descriptor. The memory is freed when both processes have exited.
"""

import mmap
import os
import sys
import tempfile
from typing import Any

import numpy as np

from gen_worker.contract.files.hashes import PAGE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def open_anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("checkpoint-staging", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class StagingBuffer:
    """Maps the file and grows it on demand. Each side has one, with its own descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None

    def view(self, size_bytes: int) -> Bytes:
        """At least `size_bytes`, in whole pages. A view of an earlier, smaller mapping stays valid memory."""
        padded = max(-(-size_bytes // PAGE) * PAGE, PAGE)
        if self._map is None or len(self._map) < padded:
            size = os.fstat(self.fd).st_size
            if size < padded:
                os.ftruncate(self.fd, padded)
                if hasattr(os, "posix_fallocate"):  # out of memory is an OSError here, a SIGBUS later
                    os.posix_fallocate(self.fd, size, padded - size)
            # The old mapping is freed with its last view.
            self._map = mmap.mmap(self.fd, padded, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        return np.frombuffer(self._map, dtype=np.uint8)[:padded]

    def close(self) -> None:
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
