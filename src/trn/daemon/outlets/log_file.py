"""Files of JSON lines that log collectors follow: appended to, never cut, renamed when they are long enough.

A file is opened by its name for each append. After a rename or removal by somebody else, a new file is created.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import make_folder, sync_path
from gen_worker.contract.files.regular import open_regular
from trn.core.home import FULL, LOG_SUFFIX, LogFolder
from trn.core.runs import RunRecord


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One of the files that get lines of a run. `kind` names it in the registry."""

    kind: str
    path: Path  # of the file, or of its log folder
    has_events: ClassVar[bool] = False
    has_output: ClassVar[bool] = False
    has_job_lines: ClassVar[bool] = False

    def path_at(self, now_ms: int) -> Path:  # noqa: ARG002
        """Where lines go now."""
        return self.path

    def old_name(self, number: int) -> str:  # noqa: ARG002
        """The name of a part that is full; empty: the file is never renamed."""
        return ""


@dataclass(frozen=True, kw_only=True)
class DayLog(LogFile):
    """`YYYY/MM/DD/<run>.log.jsonl`: the events and the output of one run."""

    run_id: str
    has_events: ClassVar[bool] = True
    has_output: ClassVar[bool] = True

    def path_at(self, now_ms: int) -> Path:
        return LogFolder(self.path).run(self.run_id, now_ms)

    def old_name(self, number: int) -> str:
        return f"{self.run_id}{FULL}{number}{LOG_SUFFIX}"


class JobsIndex(LogFile):
    """`jobs/index.jsonl`: a line when a run is accepted, and one when it has ended."""

    has_job_lines: ClassVar[bool] = True

    def path_at(self, now_ms: int) -> Path:  # noqa: ARG002
        return LogFolder(self.path).jobs_index

    def old_name(self, number: int) -> str:
        return f"index.{number}.jsonl"


class EventLog(LogFile):
    """A user's file: events and job lines of the runs that name it. Only the user renames it."""

    has_events: ClassVar[bool] = True
    has_job_lines: ClassVar[bool] = True


def log_files(run: RunRecord, logs: LogFolder) -> Iterator[LogFile]:
    """The files that get lines of this run; `logs` are the home's."""
    folders = {"home": logs.root}
    if run.log_dir and Path(run.log_dir) != logs.root:
        folders["dir"] = Path(run.log_dir)
    for name, folder in folders.items():
        yield DayLog(kind=f"{name}_log", path=folder, run_id=run.run_id)
        yield JobsIndex(kind=f"{name}_jobs", path=folder)
    if run.event_log:
        yield EventLog(kind="event_log", path=Path(run.event_log))


def append(file: LogFile, lines: bytes, now_ms: int, *, max_bytes: int, min_free_bytes: int) -> None:
    """Append whole lines; they are on disk on return. OSError: a part of them may be in the file.

    An unfinished line at the end, left by a full disk or a power cut, is ended with a newline first.
    """
    path = file.path_at(now_ms)
    make_folder(path.parent)
    found = os.statvfs(path.parent)
    if found.f_bavail * found.f_frsize < min_free_bytes:
        # Without the free bytes: they change all the time, and each fault is logged once.
        raise OSError(errno.ENOSPC, f"less than {min_free_bytes:,} bytes are free")
    _rename_full(file, path, max_bytes)
    is_new = not path.exists()
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, follow=True)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes and os.pread(fd, 1, size_bytes - 1) != b"\n":
            lines = b"\n" + lines
        failpoint("logs.write")
        view = memoryview(lines)
        while view:
            view = view[os.write(fd, view) :]
        failpoint("logs.written")
        os.fsync(fd)
    finally:
        os.close(fd)
    if is_new:
        sync_path(path.parent)
    failpoint("logs.synced")


def _rename_full(file: LogFile, path: Path, max_bytes: int) -> None:
    if not file.old_name(1) or not path.exists() or path.stat().st_size < max_bytes:
        return
    number = 1
    while os.path.lexists(renamed := path.with_name(file.old_name(number))):
        number += 1
    path.rename(renamed)
    sync_path(path.parent)
    failpoint("logs.renamed")
