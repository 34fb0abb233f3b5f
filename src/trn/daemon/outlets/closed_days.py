"""Days that are over are compressed: a file that nobody writes any more becomes `<name>.gz`.

The compressed file is written under another name, synced, read back and compared; then it gets its name, then the
plain one goes. Killed at any point, the next pass does it again: there is always at least one whole file of the two.
"""

import contextlib
import gzip
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gen_worker.contract.failpoints import failpoint
from trn.core.home import FULL, LOG_SUFFIX, LogFolder

logger = logging.getLogger("trn.daemon.logs")

DAY_MS = 24 * 3600 * 1000
BLOCK_BYTES = 1 << 20
LEVEL = 6


class ClosedDays:
    """One pass a day, one file a step, oldest day first. For one thread."""

    def __init__(
        self,
        *,
        folders: Callable[[], list[LogFolder]],
        is_pending: Callable[[str], bool],
        min_free_bytes: int,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._folders = folders
        self._is_pending = is_pending
        self._min_free_bytes = min_free_bytes
        self._clock_ms = clock_ms
        self._day = -1  # of the last pass
        self._files: Iterator[Path] = iter(())

    @property
    def next_ms(self) -> int:
        """When the next day begins."""
        return (self._clock_ms() // DAY_MS + 1) * DAY_MS

    def step(self) -> bool:
        """Compress one file; False where none is left today."""
        day = self._clock_ms() // DAY_MS
        if day != self._day:
            self._day = day
            self._files = self._find(day)
        for path in self._files:
            try:
                if self._has_room(path):
                    compress(path)
                    return True
            except OSError as fault:
                logger.warning("%s cannot be compressed: %s; it is tried again tomorrow", path, fault)
        return False

    def _find(self, day: int) -> Iterator[Path]:
        """Files older than the day before, of runs that have nothing left for them."""
        oldest_open = time.strftime("%Y/%m/%d", time.gmtime((day - 1) * DAY_MS // 1000))
        for folder in self._folders():
            for path in _day_folders(folder.root):
                if path.relative_to(folder.root).as_posix() < oldest_open:
                    for name in _names(path):
                        run_id = name.removesuffix(LOG_SUFFIX)
                        # Releases before families wrote `<run>.1` for `<run>~1`.
                        run_ids = {run_id.partition(FULL)[0], re.sub(r"\.\d+\Z", "", run_id)}
                        if name.endswith(LOG_SUFFIX) and not any(map(self._is_pending, run_ids)):
                            yield path / name

    def _has_room(self, path: Path) -> bool:
        found = os.statvfs(path.parent)
        return found.f_bavail * found.f_frsize > self._min_free_bytes + path.stat().st_size


def compress(path: Path) -> None:
    """`<path>.gz` instead of it."""
    target = path.with_name(f"{path.name}.gz")
    temporary = path.with_name(f"{path.name}.gz.tmp")
    times = path.stat()
    with path.open("rb") as source, temporary.open("wb") as raw:
        with gzip.GzipFile(
            filename=path.name, fileobj=raw, mode="wb", compresslevel=LEVEL, mtime=0
        ) as packed:
            digest = _copy(source, packed)
        raw.flush()
        os.fsync(raw.fileno())
    failpoint("logs.zip_written")
    with gzip.open(temporary, "rb") as packed_again:
        if _copy(packed_again, None) != digest:
            temporary.unlink()
            raise OSError(f"{temporary} does not hold what was written")
    os.utime(temporary, ns=(times.st_atime_ns, times.st_mtime_ns))
    temporary.rename(target)
    _sync(path.parent)
    failpoint("logs.zip_renamed")
    path.unlink()
    _sync(path.parent)


def _copy(source: IO[bytes] | gzip.GzipFile, target: gzip.GzipFile | None) -> bytes:
    """The digest of what there is."""
    digest = hashlib.sha256()
    while block := source.read(BLOCK_BYTES):
        digest.update(block)
        if target is not None:
            target.write(block)
    return digest.digest()


def _day_folders(root: Path) -> Iterator[Path]:
    """`YYYY/MM/DD` below it, the oldest first."""
    for year in _numbered(root, 4):
        for month in _numbered(year, 2):
            yield from _numbered(month, 2)


def _numbered(folder: Path, width: int) -> list[Path]:
    return [folder / name for name in _names(folder) if re.fullmatch(rf"\d{{{width}}}", name)]


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(folder))  # noqa: PTH208
    return []


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
