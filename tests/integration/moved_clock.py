"""A wall clock that a test puts forward or back under a daemon that runs.

`python -P moved_clock.py CLOCK --home HOME serve` is `python -m trn.daemon --home HOME serve`, except that its
`time.time` and `time.time_ns` are off by what the file CLOCK says, at every look. What the kernel alone knows (monotonic
time, the times of files) stays, as it does when somebody sets the clock of a machine.
"""

import mmap
import os
import struct
import sys
import time
from pathlib import Path

_OFFSET = struct.Struct("<q")  # nanoseconds


class MovedClock:
    """The offset of a clock, shared by all who have the file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _OFFSET.size)
            self._shared = mmap.mmap(fd, _OFFSET.size)
        finally:
            os.close(fd)

    @property
    def offset_ns(self) -> int:
        return int(_OFFSET.unpack(self._shared[:])[0])

    def move(self, by_s: float) -> None:
        self._shared[:] = _OFFSET.pack(self.offset_ns + round(by_s * 1e9))


def serve_with(clock: MovedClock, arguments: list[str]) -> int:
    true_time_ns = time.time_ns
    time.time_ns = lambda: true_time_ns() + clock.offset_ns
    time.time = lambda: time.time_ns() / 1e9
    from trn.daemon.__main__ import main  # only now: modules take the clock when they are imported

    return main(arguments)


if __name__ == "__main__":
    sys.exit(serve_with(MovedClock(Path(sys.argv[1])), sys.argv[2:]))
