"""A file of whole lines that others follow: it is only ever appended to, and renamed when it is long enough.

- What was written is never cut off or written again: whoever follows the file may have read it.
- It is opened by its name for each round. One that was renamed or removed meanwhile is another file from then on.
- It is renamed only when all that is in it is committed; so what a crash left behind is at the end of the newest one.
"""

import calendar
import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.regular_files import open_regular
from trn.core.home import FULL, LOG_SUFFIX, LogFolder
from trn.core.runs import RunRecord
from trn.daemon.outlets.log_lines import Mark, read_mark

BLOCK_BYTES = 64 << 10
MAX_LOOK_BYTES = 64 << 20  # from the end: more than a round ever writes
DAY_MS = 24 * 3600 * 1000
MAX_DAYS, DAYS_BEFORE = (
    400,
    7,
)  # that are looked through; before a run was submitted, by a clock that was put back
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


class LogLimits(NamedTuple):
    """Of a file and of its disk."""

    max_bytes: int | None  # None: it is not renamed
    min_free_bytes: int


class LogFile:
    """One file, by the names that its kind gives it. For one thread.

    `is_looked_at`: what is in it is known; `is_sure`: and all of that is committed.
    """

    def __init__(self, kind: str, limits: LogLimits) -> None:
        self.kind = kind
        self._limits = limits
        self.is_looked_at = self.is_sure = False
        self.half = b""  # a line at the end of `half_path` that was only begun
        self.half_path: Path | None = None
        self.fault = ""
        self.retry_at = 0.0
        self._num_failures = 0

    def path_at(self, now_ms: int) -> Path:
        """Where lines go now."""
        raise NotImplementedError

    def paths(self, now_ms: int) -> list[Path]:
        """All that may have lines which are not committed."""
        return [self.path_at(now_ms)]

    def renamed_path(self, path: Path, number: int) -> Path:
        raise NotImplementedError

    def look(self, is_committed: Callable[[Mark], bool], now_ms: int) -> list[Mark]:
        """Lines at the end that come after all that is committed, the last first; sets `half`."""
        marks: list[Mark] = []
        self.half, self.half_path = b"", None
        for path in self.paths(now_ms):
            try:
                fd = open_regular(path, follow=True)
            except FileNotFoundError:
                continue
            try:
                lines = _lines_backwards(fd)
                half = next(lines, b"")
                if half:
                    self.half, self.half_path = half, path
                for line in lines:
                    mark = read_mark(line)
                    if mark is not None and is_committed(mark):
                        break
                    if mark is not None:
                        marks.append(mark)
            finally:
                os.close(fd)
        self.is_looked_at = True
        self.is_sure = not marks and not self.half
        return marks

    def room_bytes(self, now_ms: int) -> int:
        """How much may be written before it is renamed; renames it first where it is long enough. If `is_sure` only."""
        assert self.is_sure
        max_bytes = self._limits.max_bytes
        if max_bytes is None:
            return 1 << 62
        path = self.path_at(now_ms)
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError:
            return max_bytes
        if size_bytes < max_bytes:
            return max_bytes - size_bytes
        number = 1
        while os.path.lexists(renamed := self.renamed_path(path, number)):
            number += 1
        path.rename(renamed)
        _sync_folder(path.parent)
        failpoint("logs.renamed")
        return max_bytes

    def append(self, data: bytes, now_ms: int) -> None:
        """Whole lines, or what completes one first; on disk when it returns. OSError: perhaps a part of them is."""
        if self.half_path is not None and self.half_path != self.path_at(now_ms):
            end = data.index(b"\n") + 1  # of a day that is over: only that line
            self._write(self.half_path, data[:end], is_completion=True)
            data, self.half_path = data[end:], None
        if data:
            self._write(self.path_at(now_ms), data, is_completion=self.half_path is not None)
        self.half, self.half_path = b"", None

    def failed(self, fault: Exception, now: float) -> bool:
        """It is tried again later, after ever longer pauses; whether that is news."""
        words = (fault.strerror if isinstance(fault, OSError) else "") or str(fault)
        is_news = words != self.fault
        self.fault = words
        self.forget()
        self.retry_at = now + min(FIRST_PAUSE_S * 2**self._num_failures, LONGEST_PAUSE_S)
        self._num_failures = min(self._num_failures + 1, 10)
        return is_news

    def is_away(self, now: float) -> bool:
        """It failed, and it is not time to try again."""
        return bool(self.fault) and self.retry_at > now

    def committed(self) -> None:
        """All that was written or found is committed."""
        self.fault, self.retry_at, self._num_failures = "", 0.0, 0
        self.is_sure = not self.half

    def forget(self) -> None:
        """What is in it has to be found out again."""
        self.is_looked_at = self.is_sure = False
        self.half, self.half_path = b"", None

    def _write(self, path: Path, data: bytes, *, is_completion: bool) -> None:
        _make_folder(path.parent)
        self._require_room(path.parent)
        fd, is_new = _open(path)
        try:
            size_bytes = os.fstat(fd).st_size
            if not is_completion and size_bytes and os.pread(fd, 1, size_bytes - 1) != b"\n":
                data = b"\n" + data  # somebody else's line, which has no end
            failpoint("logs.write")
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            failpoint("logs.written")
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            _sync_folder(path.parent)
        failpoint("logs.synced")

    def _require_room(self, folder: Path) -> None:
        found = os.statvfs(folder)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < self._limits.min_free_bytes:
            # Not how much is free: that changes all the time, and each fault is told once.
            raise OSError(errno.ENOSPC, f"less than {self._limits.min_free_bytes:,} bytes are free")


class DayLog(LogFile):
    """`YYYY/MM/DD/<run>.log.jsonl`: the events and the output of one run."""

    def __init__(self, kind: str, limits: LogLimits, folder: LogFolder, run: RunRecord) -> None:
        super().__init__(kind, limits)
        self._folder = folder
        self._run_id = run.run_id
        self._times_ms = run.submitted_ms, run.updated_ms

    def path_at(self, now_ms: int) -> Path:
        return self._folder.run(self._run_id, now_ms)

    def paths(self, now_ms: int) -> list[Path]:
        """Of each day since the run was submitted: a crash may have been days ago, and a clock may have been put back."""
        last = max(max(now_ms, *self._times_ms) // DAY_MS, _newest_day(self._folder.root))
        first = max(min(now_ms, *self._times_ms) // DAY_MS - DAYS_BEFORE, last - MAX_DAYS)
        return [self._folder.run(self._run_id, day * DAY_MS) for day in range(first, last + 1)]

    def renamed_path(self, path: Path, number: int) -> Path:
        return path.with_name(f"{self._run_id}{FULL}{number}{LOG_SUFFIX}")


class JobsIndex(LogFile):
    """`jobs/index.jsonl`: a line when a run is accepted, and one when it has ended."""

    def __init__(self, kind: str, limits: LogLimits, folder: LogFolder) -> None:
        super().__init__(kind, limits)
        self._path = folder.jobs_index

    def path_at(self, now_ms: int) -> Path:  # noqa: ARG002
        return self._path

    def renamed_path(self, path: Path, number: int) -> Path:
        return path.with_name(f"index.{number}.jsonl")


class EventLog(LogFile):
    """A file of the user's: events and job lines of the runs that name it. Renaming it is the user's affair."""

    def __init__(self, kind: str, limits: LogLimits, path: Path) -> None:
        super().__init__(kind, limits._replace(max_bytes=None))
        self._path = path

    def path_at(self, now_ms: int) -> Path:  # noqa: ARG002
        return self._path


def _newest_day(root: Path) -> int:
    """The last day that has a folder, counted from 1970; 0 where there is none."""
    parts: list[int] = []
    folder = root
    for width in (4, 2, 2):
        try:
            names = [name for name in os.listdir(folder) if re.fullmatch(rf"\d{{{width}}}", name)]  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return 0
        if not names:
            return 0
        parts.append(int(max(names)))
        folder = folder / max(names)
    return calendar.timegm((*parts, 0, 0, 0)) // (24 * 3600)


def _open(path: Path) -> tuple[int, bool]:
    """(for appending and reading, whether it was made). Never waits, whatever is in its place."""
    flags = os.O_RDWR | os.O_APPEND
    try:
        return open_regular(path, flags, follow=True), False
    except FileNotFoundError:
        return open_regular(path, flags | os.O_CREAT, follow=True), True


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    made = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for one in made:
        _sync_folder(one.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(fd)
    finally:
        os.close(fd)


def _lines_backwards(fd: int) -> Iterator[bytes]:
    """First what is there of a line without its newline, then whole lines, the last one first."""
    start = os.fstat(fd).st_size
    end = start
    rest, is_first = b"", True
    while start > 0 and end - start < MAX_LOOK_BYTES:
        size = min(BLOCK_BYTES, start)
        start -= size
        rest, *lines = (os.pread(fd, size, start) + rest).split(b"\n")
        if lines and is_first:
            yield lines.pop()
            is_first = False
        yield from reversed(lines)
    if start == 0:
        yield rest
