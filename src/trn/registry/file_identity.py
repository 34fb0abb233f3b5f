"""Whether a database's path still names the file that is open.

SQLite writes to the file that it opened, wherever that is by now. A commit into a file that was deleted or replaced is
durable, and nobody finds it again. So the path is looked at after each commit, before anybody is told of it.

- The file and its log (`-wal`) are known by device and inode.
- Where nobody else writes the file, its size and time of change are known as well: in WAL mode it changes only in a
  checkpoint, and this process makes them all. So a copy over it (`cp backup registry.db`) is noticed, too.
"""

import os
from pathlib import Path

_Place = tuple[int, int]  # device, inode


class OpenFile:
    """One open database. Not for several threads at once, but any may be the one."""

    def __init__(self, path: Path, *, is_changed_by_checkpoints_alone: bool) -> None:
        """From its connection's thread, once the connection is open."""
        self.path = path
        self._wal = f"{path}-wal"
        self._is_content_known = is_changed_by_checkpoints_alone
        self._place: _Place = (0, 0)
        self._content = (0, 0)  # size, time of change
        self._wal_place: _Place | None = None  # it is made by the first change
        self.note()

    def note(self) -> None:
        """What is at the path now is the file that is open: after opening it, and after each own checkpoint."""
        found = os.stat(self.path)  # noqa: PTH116  (hot)
        self._place = (found.st_dev, found.st_ino)
        self._content = (found.st_size, found.st_mtime_ns)

    def find_problem(self) -> str:
        """Why a commit would not be found again; empty: all is well. Two calls of the system."""
        try:
            found = os.stat(self.path)  # noqa: PTH116  (hot)
        except OSError:
            return f"{self.path} was deleted while the daemon had it open"
        if (found.st_dev, found.st_ino) != self._place:
            return f"{self.path} was replaced by another file while the daemon had it open"
        if self._is_content_known and (found.st_size, found.st_mtime_ns) != self._content:
            return f"{self.path} was written by another program while the daemon had it open"
        return self._find_wal_problem()

    def _find_wal_problem(self) -> str:
        try:
            found = os.stat(self._wal)  # noqa: PTH116  (hot)
        except OSError:
            return "" if self._wal_place is None else f"{self._wal} was deleted while the daemon had it open"
        place = (found.st_dev, found.st_ino)
        if self._wal_place is None:
            self._wal_place = place
        return "" if self._wal_place == place else f"{self._wal} was replaced while the daemon had it open"
