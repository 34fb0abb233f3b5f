"""Copies what runs say into their log files, each line exactly once, through crashes and full disks.

One round: what is new in the runs' folders is appended to their files, the files are synced, then all the places are
committed in one transaction; only then comes the next round. From this follows the invariant:

    In each file everything that is committed comes before everything that is not.

So after a crash, a failed write or a failed commit a file is looked through from its end to the first line that is
committed. The whole lines after that one are taken for written; of a half line at the very end, which a full disk
leaves behind, the rest is appended (`log_lines` says why it can be known). Nothing is ever cut off.

The cursor of the outbox never passes a run of which some file still lacks something.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gen_worker.contract.failpoints import failpoint
from trn.core.home import Home, LogFolder
from trn.core.runs import RunRecord
from trn.core.settings import Settings
from trn.daemon.outlets.log_file import LogFile
from trn.daemon.outlets.log_lines import Mark, completion
from trn.daemon.outlets.outbox import Outbox
from trn.daemon.outlets.run_copies import Copy, RunCopies
from trn.daemon.outlets.run_lines import Piece, RunLines
from trn.registry.log_places import LogPlace, LogPlaces
from trn.registry.reader import RegistryReader
from trn.registry.sqlite import RunRegistry

logger = logging.getLogger("trn.daemon.logs")

CONSUMER = "logs"
NEWS_LIMIT = 500
COPY_BYTES = 2 << 20  # of one copy in a round
ROUND_BYTES = 16 << 20
NUM_WARNINGS = 3


class _Round:
    """What one round has found, written, and is about to commit."""

    def __init__(self, now: float, now_ms: int) -> None:
        self.now = now
        self.now_ms = now_ms
        self.room_bytes = ROUND_BYTES
        self.pieces: dict[LogFile, list[tuple[Copy, Piece]]] = {}
        self.places: dict[Copy, LogPlace] = {}  # of what is in the files
        self.unfinished: set[str] = set()  # runs with more than a round takes

    def add(self, copy: Copy, pieces: Iterable[Piece]) -> None:
        """As many pieces as one copy may have."""
        of_file = self.pieces.setdefault(copy.file, [])
        self.places.setdefault(copy, copy.place)
        size_bytes = 0
        for piece in pieces:
            if size_bytes >= COPY_BYTES:
                self.unfinished.add(copy.run_id)
                return
            of_file.append((copy, piece))
            size_bytes += len(piece.lines)
            self.room_bytes -= len(piece.lines)


class LogCopier:
    """The blocking part, for one thread."""

    def __init__(
        self,
        *,
        registry: RunRegistry,
        home: Home,
        settings: Settings,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._clock_ms = clock_ms
        self._clock = clock
        self._reader = RegistryReader(home.registry)
        self._outbox = Outbox(registry, home, CONSUMER)
        self._places = LogPlaces(home.registry, registry.writer)
        self._copies = RunCopies(home, settings, self._places)
        self._lines = RunLines(home, self._outbox, clock_ms)
        self._told: int | None = None  # the outbox's cursor
        self._seen = 0  # the last change that was taken from the news
        self._due: dict[str, RunRecord] = {}
        self._waiting: dict[str, RunRecord] = {}  # for a file that cannot be written now
        self.warnings: list[str] = []

    def close(self) -> None:
        self._reader.close()
        self._outbox.close()
        self._places.close()

    def is_pending(self, run_id: str) -> bool:
        """Whether the run still has something for one of its files."""
        return run_id in self._due or run_id in self._waiting

    def folders(self) -> list[LogFolder]:
        """The home's, and all that runs have named."""
        return [self._home.logs, *map(LogFolder, map(Path, self._places.log_dirs()))]

    def copy(self) -> float | None:
        """One round; after how many seconds there is more to do (None: when there are news).

        What it raises is of the registry: nothing is lost, and it can be called again.
        """
        now = self._clock()
        try:
            self._take_news(now)
            round_ = self._collect(_Round(now, self._clock_ms()))
            self._write(round_)
            self._commit(round_)
        except BaseException:
            self._copies.forget_places()
            self._seen = self._told or 0
            raise
        finally:
            self._tell()
        if self._due:
            return 0.0
        retries = [file.retry_at for file in self._copies.files if file.fault]
        return max(0.0, min(retries) - now) if self._waiting and retries else None

    def _take_news(self, now: float) -> None:
        if self._told is None:
            self._told = self._seen = self._outbox.change
        while True:
            news = self._reader.changed(self._seen, NEWS_LIMIT)
            for run in news:
                self._seen = run.change
                self._waiting.pop(run.run_id, None)
                self._due[run.run_id] = run
            if len(news) < NEWS_LIMIT:
                break
        if self._waiting and any(file.fault and file.retry_at <= now for file in self._copies.files):
            self._due, self._waiting = self._pending(), {}

    def _pending(self) -> dict[str, RunRecord]:
        return {**self._waiting, **self._due}

    def _collect(self, round_: _Round) -> _Round:
        for run in self._due.values():
            if round_.room_bytes <= 0:
                round_.unfinished.add(run.run_id)
                continue
            for copy in self._copies.of(run):
                if copy.file.is_away(round_.now) or not copy.may_lack(run):
                    continue
                try:
                    if not copy.file.is_looked_at:
                        self._look(copy.file, round_)
                    round_.add(copy, self._lines.after(run, copy))
                except Exception as fault:  # one copy's trouble is not the others'
                    self._put_off(copy.file, fault, round_)
        return round_

    def _look(self, file: LogFile, round_: _Round) -> None:
        """What of the uncommitted is in the file already is taken for written, and committed with this round.

        Lines of another submission that had the run's id are no lines of this run.
        """
        committed: dict[str, LogPlace] = {}
        pending = self._pending()

        def is_committed(mark: Mark) -> bool:
            run = pending.get(mark.run_id)
            if run is not None and run.nonce != mark.nonce:
                return False
            if mark.run_id not in committed:
                committed[mark.run_id] = self._copies.place(mark.run_id, file.kind)
            return _has(committed[mark.run_id], mark)

        marks = file.look(is_committed, round_.now_ms)
        for run_id in {mark.run_id for mark in marks} & pending.keys():
            run = pending[run_id]
            for copy in self._copies.of(run):
                if copy.file is file:
                    found = [mark for mark in marks if mark.run_id == run_id and mark.nonce == run.nonce]
                    if found:
                        copy.place = round_.places[copy] = self._lines.place_of(run, copy, found)

    def _write(self, round_: _Round) -> None:
        for file, pieces in round_.pieces.items():
            if file.is_away(round_.now):
                continue  # it failed while it was looked at
            try:
                self._write_file(file, pieces, round_)
            except Exception as fault:
                self._put_off(file, fault, round_)

    def _write_file(self, file: LogFile, pieces: list[tuple[Copy, Piece]], round_: _Round) -> None:
        if file.half and self._complete(file, round_):
            round_.unfinished.update(copy.run_id for copy, _ in pieces)  # they go on from there
            return
        begin = b""
        if file.half and any(piece.lines for _, piece in pieces):
            logger.warning("%s ends with half a line that is not ours: we begin below it", file.half_path)
            begin = b"\n"
        elif file.is_sure and any(piece.lines for _, piece in pieces):
            pieces, rest = _split(pieces, file.room_bytes(round_.now_ms))
            round_.unfinished.update(copy.run_id for copy, _ in rest)
        data = begin + b"".join([piece.lines for _, piece in pieces])
        if data:
            file.append(data, round_.now_ms)
        for copy, piece in pieces:
            round_.places[copy] = piece.place

    def _complete(self, file: LogFile, round_: _Round) -> bool:
        """Append the rest of the half line, and of the piece that it is the beginning of; whether it is one of ours."""
        for run in self._pending().values():
            for copy in self._copies.of(run):
                for piece in self._lines.beginnings(run, copy) if copy.file is file else ():
                    rest = completion(file.half, piece.lines)
                    if rest is not None:
                        file.append(rest, round_.now_ms)
                        round_.places[copy] = piece.place
                        return True
        return False

    def _put_off(self, file: LogFile, fault: Exception, round_: _Round) -> None:
        if file.failed(fault, round_.now):
            is_ours = not isinstance(fault, OSError)
            path = file.path_at(round_.now_ms)
            logger.warning("%s cannot be written: %s; will try again", path, file.fault, exc_info=is_ours)

    def _tell(self) -> None:
        now_ms = self._clock_ms()
        failing = [file for file in self._copies.files if file.fault]
        self.warnings = [
            f"{file.path_at(now_ms)} cannot be written: {file.fault}; will try again"
            for file in failing[:NUM_WARNINGS]
        ]
        if len(failing) > NUM_WARNINGS:
            self.warnings.append(f"{len(failing) - NUM_WARNINGS} more log files cannot be written")

    def _commit(self, round_: _Round) -> None:
        """The places, and then the cursor. From here on runs that have nothing left are forgotten."""
        done = {
            run_id: run
            for run_id, run in self._due.items()
            if run_id not in round_.unfinished
            and not any(copy.file.is_away(round_.now) for copy in self._copies.of(run))
        }
        left = [run.change for run_id, run in self._pending().items() if run_id not in done]
        told = min(left) - 1 if left else self._seen
        moved = {
            (copy.run_id, copy.file.kind): place
            for copy, place in round_.places.items()
            if place != copy.committed
        }
        futures = [self._places.move(moved)] if moved else []
        if told != self._told:
            futures.append(self._outbox.told({}, told))
        for future in futures:
            future.result()
            failpoint("logs.committed")
        self._told = told
        self._settle(round_, done)

    def _settle(self, round_: _Round, done: dict[str, RunRecord]) -> None:
        for copy, place in round_.places.items():
            copy.place = copy.committed = place
        for file in round_.pieces:
            if not file.is_away(round_.now):
                file.committed()
        for run_id, run in list(self._due.items()):
            if run_id in round_.unfinished:
                self._due[run_id] = self._due.pop(run_id)  # behind the others
                continue
            del self._due[run_id]
            if run_id not in done:
                self._waiting[run_id] = run
            elif run.state.is_terminal or run.attempt == 0:  # there may be thousands that wait
                self._copies.forget(run_id)
                self._lines.forget(run_id)


def _has(place: LogPlace, mark: Mark) -> bool:
    known = {"event": place.seq, "output": place.output_offset, "job": place.num_job_lines}
    return mark.value <= known[mark.kind]


def _split(
    pieces: list[tuple[Copy, Piece]], room_bytes: int
) -> tuple[list[tuple[Copy, Piece]], list[tuple[Copy, Piece]]]:
    """Those that fit, at least one, and the others."""
    size_bytes = 0
    for index, (_, piece) in enumerate(pieces):
        if size_bytes and size_bytes + len(piece.lines) > room_bytes:
            return pieces[:index], pieces[index:]
        size_bytes += len(piece.lines)
    return pieces, []
