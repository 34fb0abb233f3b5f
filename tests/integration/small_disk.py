"""A disk of a few megabytes that a test can fill to the last byte, and empty again."""

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path

LEAST_BYTES = 4096


class SmallDisk:
    """A tmpfs at `place`. Mounting needs privileges: without them `problem` says why, and it is a plain folder."""

    def __init__(self, place: Path, *, size_bytes: int) -> None:
        self.place = place
        self._ballast = place / "ballast"
        self._full_until = float("-inf")
        place.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as fault:
            self.problem = str(fault)
        else:
            told = mounted.stderr.strip().partition("\n")[0]
            self.problem = "" if mounted.returncode == 0 else told or f"mount ended with {mounted.returncode}"

    @property
    def is_full(self) -> bool:
        return self._ballast.exists()

    @property
    def full_until(self) -> float:
        """The last moment, by the monotonic clock, at which it was full."""
        return time.monotonic() if self.is_full else self._full_until

    def fill(self) -> None:
        """A file takes all the room that is left. Blocks."""
        assert not self.problem, self.problem
        size_bytes, piece_bytes = 0, 1 << 26
        fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while piece_bytes >= LEAST_BYTES:
                try:
                    os.posix_fallocate(fd, size_bytes, piece_bytes)
                    size_bytes += piece_bytes
                except OSError as fault:
                    if fault.errno != errno.ENOSPC:
                        raise
                    piece_bytes //= 2
        finally:
            os.close(fd)

    def make_room(self) -> None:
        self._full_until = self.full_until
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Everything on it is gone."""
        if not self.problem:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["umount", "--lazy", str(self.place)], check=True)
            self.problem = "it was unmounted"
