"""Compresses log files of past days: a file that is no longer written becomes `<name>.gz`.

The compressed file is written under another name, synced, read back and compared. Then it gets its name, then the
plain file is deleted. After a crash at any point the next pass does it again: one of the two files is always whole.
"""

import gzip
import hashlib
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import sync_path
from trn.core.home import LOG_SUFFIX, LogFolder

logger = logging.getLogger("trn.daemon.logs")

DAY_MS = 24 * 3600 * 1000
LEVEL = 6
DAY_FOLDERS = "[0-9][0-9][0-9][0-9]/[0-9][0-9]/[0-9][0-9]"


class ClosedDays:
    """One pass a day, one file a step, oldest day first. For one thread."""

    def __init__(
        self,
        *,
        folders: Callable[[], list[LogFolder]],
        min_free_bytes: int,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._folders = folders
        self._min_free_bytes = min_free_bytes
        self._clock_ms = clock_ms
        self._day = -1  # of the last pass
        self._files: Iterator[Path] = iter(())

    @property
    def next_ms(self) -> int:
        """When the next day begins."""
        return (self._clock_ms() // DAY_MS + 1) * DAY_MS

    def step(self) -> bool:
        """Compress one file; False when none is left today."""
        day = self._clock_ms() // DAY_MS
        if day != self._day:
            self._day = day
            self._files = self._find(day)
        for path in self._files:
            try:
                if self._has_room(path):
                    compress(path)
                    return True
            except (OSError, EOFError, zlib.error) as fault:
                logger.warning("%s cannot be compressed: %s; will try again tomorrow", path, fault)
        return False

    def _find(self, day: int) -> Iterator[Path]:
        """Files of the days before yesterday."""
        yesterday = time.strftime("%Y/%m/%d", time.gmtime((day - 1) * DAY_MS // 1000))
        for folder in self._folders():
            for path in sorted(folder.root.glob(f"{DAY_FOLDERS}/*{LOG_SUFFIX}")):
                if path.parent.relative_to(folder.root).as_posix() < yesterday:
                    yield path

    def _has_room(self, path: Path) -> bool:
        found = os.statvfs(path.parent)
        return found.f_bavail * found.f_frsize > self._min_free_bytes + path.stat().st_size


def compress(path: Path) -> None:
    """Replace the file by `<path>.gz`. Does nothing if another file has that name: the clock was set back."""
    target = path.with_name(f"{path.name}.gz")
    if not target.exists():
        _write(path, target)
    elif not _is_same(path, target):
        return
    path.unlink()
    sync_path(path.parent)


def _write(path: Path, target: Path) -> None:
    temporary = path.with_name(f"{path.name}.gz.tmp")
    times = path.stat()
    with path.open("rb") as source, temporary.open("wb") as raw:
        with gzip.GzipFile(
            filename=path.name, fileobj=raw, mode="wb", compresslevel=LEVEL, mtime=0
        ) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        raw.flush()
        os.fsync(raw.fileno())
    failpoint("logs.zip_written")
    if not _is_same(path, temporary):
        temporary.unlink()
        raise OSError(f"{temporary} differs from what was written")
    os.utime(temporary, ns=(times.st_atime_ns, times.st_mtime_ns))
    temporary.rename(target)
    sync_path(path.parent)
    failpoint("logs.zip_renamed")


def _is_same(plain: Path, packed: Path) -> bool:
    """Whether the compressed file holds the plain one."""
    with plain.open("rb") as one, gzip.open(packed, "rb") as two:
        digests = [hashlib.file_digest(file, "sha256").digest() for file in (one, two)]
    return digests[0] == digests[1]
