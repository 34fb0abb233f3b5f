"""Copies events, output and job lines of runs into their log files: at least once, in order.

One round: append new lines to the files, sync the files, commit in the registry how far each file got. A failed write
or a crash before the commit repeats lines, and each repeat has the key of the first (see `log_lines`).

The cursor of the outbox never passes a run that has lines left for one of its files.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gen_worker.contract.failpoints import failpoint
from trn.core.home import Home, LogFolder
from trn.core.runs import RunRecord
from trn.core.settings import Settings
from trn.daemon.outlets.log_file import LogFile, append, log_files
from trn.daemon.outlets.outbox import Outbox
from trn.daemon.outlets.run_lines import RunLines
from trn.executors.base import FilesByPool
from trn.registry.base import Registry
from trn.registry.cursors import LogPlace

logger = logging.getLogger("trn.daemon.logs")

CONSUMER = "logs"
PAGE = 500  # runs
COPY_BYTES = 2 << 20  # of one run for one file in a round
ROUND_BYTES = 16 << 20  # of all
NUM_WARNINGS = 3
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


class _Failure(NamedTuple):
    """A file that cannot be written now, or a run whose folder cannot be read."""

    message: str
    retry_at: float
    pause_s: float


class LogCopier:
    """The blocking part, for one thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        files: FilesByPool,
        home: Home,
        settings: Settings,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._logs = home.logs
        self._settings = settings
        self._clock_ms = clock_ms
        self._clock = clock
        self._reader = registry.reader()
        self._outbox = Outbox(registry, files, CONSUMER)
        self._places = registry.log_places()
        self._lines = RunLines(home, files, self._outbox, clock_ms)
        self._cursor: int | None = None  # of the outbox, as it is committed
        self._seen = 0  # the last change that was read
        self._due: dict[str, RunRecord] = {}
        self._waiting: dict[str, RunRecord] = {}  # for a failure to pass
        self._failures: dict[LogFile | str, _Failure] = {}  # by file, or by run
        self._written: dict[tuple[str, str], LogPlace] = {}  # by (run, kind of file), not committed yet

    def close(self) -> None:
        self._reader.close()
        self._outbox.close()
        self._places.close()

    @property
    def warnings(self) -> list[str]:
        messages = [failure.message for failure in self._failures.values()]
        more = len(messages) - NUM_WARNINGS
        return messages[:NUM_WARNINGS] + ([f"{more} more log files cannot be written"] if more > 0 else [])

    def folders(self) -> list[LogFolder]:
        """The home's log folder, and all that runs have named."""
        return [self._logs, *map(LogFolder, map(Path, self._places.log_dirs()))]

    def copy(self) -> float | None:
        """One round; returns the seconds until there is more to do (None: when a run changes).

        Raises only faults of the registry. Nothing is lost, and it can be called again.
        """
        now = self._clock()
        self._find_runs(now)
        self._commit(self._write(now))
        if self._due:
            return 0.0
        retries = [failure.retry_at for failure in self._failures.values()]
        return max(0.0, min(retries) - now) if self._waiting and retries else None

    def _find_runs(self, now: float) -> None:
        if self._cursor is None:
            self._cursor = self._seen = self._outbox.cursor
        while True:
            page = self._reader.changed(self._seen, PAGE)
            for run in page:
                self._seen = run.change
                self._waiting.pop(run.run_id, None)
                self._due[run.run_id] = run
            if len(page) < PAGE:
                break
        if any(failure.retry_at <= now for failure in self._failures.values()):
            self._due, self._waiting = {**self._waiting, **self._due}, {}

    def _write(self, now: float) -> list[str]:
        """Append what is new of the due runs; returns those with lines left for the next round, in its order."""
        untouched: list[str] = []
        unfinished: list[str] = []
        lines: defaultdict[LogFile, list[bytes]] = defaultdict(list)
        places: dict[tuple[LogFile, str], LogPlace] = {}
        committed = self._places.of(self._due)
        room_bytes = ROUND_BYTES
        for run_id, run in self._due.items():
            if room_bytes <= 0:
                untouched.append(run_id)
                continue
            if self._is_failing(run_id, now):
                continue
            try:
                for file in log_files(run, self._logs):
                    if self._is_failing(file, now):
                        continue
                    pieces, size_bytes = lines[file], 0
                    place = self._written.get(key := (run_id, file.kind)) or committed.get(key, LogPlace())
                    for more, after in self._lines.after(run, file, place):
                        if size_bytes >= COPY_BYTES:
                            unfinished.append(run_id)
                            break
                        pieces.append(more)
                        places[file, run_id] = after
                        size_bytes += len(more)
                    room_bytes -= size_bytes
            except Exception as fault:  # of the run's folder: it must not stop the other runs
                self._fail(run_id, f"{self._home.run(run_id).root} cannot be read", fault, now)
            else:
                self._failures.pop(run_id, None)
        for file, pieces in lines.items():
            if pieces or self._failures:
                self._append(file, b"".join(pieces), now)
        self._written |= {
            (run_id, file.kind): place
            for (file, run_id), place in places.items()
            if file not in self._failures
        }
        return list(dict.fromkeys([*untouched, *unfinished]))

    def _append(self, file: LogFile, lines: bytes, now: float) -> None:
        now_ms = self._clock_ms()
        settings = self._settings
        try:
            if lines:
                append(
                    file,
                    lines,
                    now_ms,
                    max_bytes=settings.max_log_bytes,
                    min_free_bytes=settings.min_free_bytes,
                )
        except Exception as fault:
            self._fail(file, f"{file.path_at(now_ms)} cannot be written", fault, now)
        else:
            self._failures.pop(file, None)

    def _is_failing(self, key: LogFile | str, now: float) -> bool:
        if not self._failures:  # asked several times for each run
            return False
        return key in self._failures and self._failures[key].retry_at > now

    def _fail(self, key: LogFile | str, what: str, fault: Exception, now: float) -> None:
        """Note that it is tried again later, after longer and longer pauses."""
        before = self._failures.get(key)
        reason = (fault.strerror if isinstance(fault, OSError) else "") or str(fault)
        message = f"{what}: {reason}; will try again"
        pause_s = FIRST_PAUSE_S if before is None else min(2 * before.pause_s, MAX_PAUSE_S)
        self._failures[key] = _Failure(message, now + pause_s, pause_s)
        if before is None or before.message != message:
            logger.warning("%s", message, exc_info=not isinstance(fault, OSError))

    def _commit(self, unfinished: list[str]) -> None:
        """Commit the places, then the cursor. Runs without lines left are forgotten."""
        left = {run_id: self._due[run_id] for run_id in unfinished}
        waiting = dict(self._waiting)
        for run_id, run in self._due.items() if self._failures else ():
            keys = [run_id, *log_files(run, self._logs)]
            if run_id not in left and any(key in self._failures for key in keys):
                waiting[run_id] = run
        pending = [*left.values(), *waiting.values()]
        cursor = min((run.change for run in pending), default=self._seen + 1) - 1
        futures = [self._places.move(self._written)] if self._written else []
        if cursor != self._cursor:
            self._outbox.advance({}, cursor)
            futures.append(self._outbox.commit())
        for future in futures:
            future.result()
            failpoint("logs.committed")
        self._written, self._cursor = {}, cursor
        self._due, self._waiting = left, waiting
