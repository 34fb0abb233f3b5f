"""Metric points: a file of their own, so that a flood of them delays no change of a run.

Invariants
- How far a run's events file has been taken in commits with the points of it. The file is synced lazily, so a power
  cut may take its last commits; it then is behind the registry, never inconsistent, and ingest catches it up.
- Events up to `last_seq` are known: a batch that is repeated, wholly or in part, adds nothing twice.
- A series has one point for a step: the newest. The first point of a later attempt, at step s, takes away what earlier
  attempts left in that series from s on: the model went back, and so does its history.
"""

import contextlib
import math
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from trn.core.errors import NotFoundError, TooMuchError
from trn.core.runs import LineagePart
from trn.registry.connection import OpenFile, checkpoint_file, copy_to, migrate, open_reader, open_writer
from trn.registry.named_queries import metrics_sql as sql
from trn.registry.writer import RegistryWriter

MIN_THINNED = 3  # the first, the last, and one for all between
WAL_PAGES = 4000  # 16 MB; maintenance comes by too rarely for what a flood of points leaves in the log
MAX_BEHIND = (
    1000  # runs that a power cut, or a daemon that was killed on a full disk, may have left without points
)

_NO_STEP = (1 << 63) - 1

# (seq, attempt, name, step, value, timestamp_ms): plain tuples, there are very many
Point = tuple[int, int, str, int, float, int]


class Place(NamedTuple):
    """How far a run's events file has been taken in."""

    offset: int = 0
    last_seq: int = 0


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one name, by step. Where thinned out, each stands for the ones since the one before it."""

    name: str
    steps: list[int]
    values: list[float]
    timestamps_ms: list[int]
    num_points: int  # that there are in the range
    lows: list[float] = []  # only where thinned out
    highs: list[float] = []


class Extremes(NamedTuple):
    """The min and the max of a metric's finite values, each with its first step; None where there are none."""

    min_value: float | None = None
    min_step: int | None = None
    max_value: float | None = None
    max_step: int | None = None


class Stretch(NamedTuple):
    """Steps of one run, both included."""

    run_id: str
    from_step: int | None = None
    to_step: int | None = None


def line_of_descent(
    parts: Sequence[LineagePart], from_step: int | None = None, to_step: int | None = None
) -> list[Stretch]:
    """What to read for one curve: of each run the steps that led to the next one, within that range."""
    stretches = []
    for number, part in enumerate(parts):
        begin = max(part.from_step + 1 if number else 0, from_step or 0)
        end = min((step for step in (part.to_step, to_step) if step is not None), default=None)
        if end is None or begin <= end:
            stretches.append(Stretch(part.run_id, begin, end))
    return stretches


class MetricReader:
    """Reads of the metric points; any thread."""

    def __init__(self, source: Path | sqlite3.Connection) -> None:
        """Of a file, or over a connection that is open: it is closed with this."""
        if isinstance(source, Path) and not source.exists():
            raise NotFoundError(f"there are no metrics at {source}: no run has reported any yet")
        self._read = source if isinstance(source, sqlite3.Connection) else open_reader(source)
        self._reading = threading.Lock()

    def close(self) -> None:
        self._read.close()

    def query(
        self,
        run_id: str,
        names: Sequence[str] = (),
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        max_answer: int | None = None,
    ) -> list[Series]:
        """The named series (none: all), both steps included, each of at most `max_points` points (0: all; at least 3).

        Thinned out, the first and the last point stay as they are; between them each of the equal stretches of steps
        gives its last point, or its last that is not a number, with the least and the greatest of its numbers.
        TooMuchError, before anything is read, where that would be more than `max_answer` points in all.
        """
        stretch = Stretch(run_id, from_step, to_step)
        return self.query_line([stretch], names, max_points, max_answer)

    def query_line(
        self,
        stretches: Sequence[Stretch],
        names: Sequence[str] = (),
        max_points: int = 0,
        max_answer: int | None = None,
    ) -> list[Series]:
        """As `query`, of several runs as one curve: the stretches follow each other. Where thinned out, each has a share
        of `max_points` by its number of points, and at least 3.
        """
        with self._reading:
            self._read.execute("BEGIN")  # one state of the file for all that follows
            try:
                pieces = self._pieces(stretches, names)
                if max_answer is not None:
                    _require_few(pieces, max_points, max_answer)
                return [self._curve(name, pieces[name], max_points) for name in sorted(pieces)]
            finally:
                self._read.execute("COMMIT")

    def extremes(self, run_id: str) -> dict[str, Extremes]:
        """Of each of the run's metrics, over all its points."""
        with self._reading:
            rows = self._read.execute(sql("extremes"), {"run_id": run_id}).fetchall()
        return {row["name"]: Extremes(*(row[name] for name in Extremes._fields)) for row in rows}

    def _pieces(self, stretches: Sequence[Stretch], names: Sequence[str]) -> "dict[str, list[_Piece]]":
        """Where the points are, by name; only what has any."""
        pieces: dict[str, list[_Piece]] = {}
        encoded = msgspec.json.encode(list(names)).decode()
        for stretch in stretches:
            steps = {
                "from_step": 0 if stretch.from_step is None else min(stretch.from_step, _NO_STEP),
                "to_step": _NO_STEP if stretch.to_step is None else min(stretch.to_step, _NO_STEP),
            }
            for row in self._read.execute(
                sql("series"), {"run_id": stretch.run_id, "names": encoded}
            ).fetchall():
                wanted = {"series_key": row["series_key"], **steps}
                extent = self._read.execute(sql("extent"), wanted).fetchone()
                if extent["num_points"]:
                    piece = _Piece(wanted, extent["num_points"], extent["first_step"], extent["last_step"])
                    pieces.setdefault(row["name"], []).append(piece)
        return pieces

    def _curve(self, name: str, pieces: "Sequence[_Piece]", max_points: int) -> Series:
        num_points = sum(piece.num_points for piece in pieces)
        is_thinned = 0 < max(max_points, MIN_THINNED if max_points else 0) < num_points
        steps: list[int] = []
        columns: tuple[list[float], list[float], list[float]] = [], [], []  # values, lows, highs
        timestamps_ms: list[int] = []
        for piece in pieces:
            share = max(max_points * piece.num_points // num_points, MIN_THINNED)
            if is_thinned and share < piece.num_points:
                buckets = {
                    "series_key": piece.wanted["series_key"],
                    "first_step": piece.first_step,
                    "last_step": piece.last_step,
                    "num_buckets": share - 2,
                }
                rows = self._read.execute(sql("thinned_points"), buckets).fetchall()
            else:
                rows = [(*row, row[1], row[1]) for row in self._read.execute(sql("points"), piece.wanted)]
            steps += [row[0] for row in rows]
            timestamps_ms += [row[2] for row in rows]
            for column, index in zip(columns, (1, 3, 4), strict=True):
                column += [_number(row[index]) for row in rows]
        values, lows, highs = columns
        return Series(
            name=name,
            steps=steps,
            values=values,
            timestamps_ms=timestamps_ms,
            num_points=num_points,
            lows=lows if is_thinned else [],
            highs=highs if is_thinned else [],
        )


class _Piece(NamedTuple):
    """A stretch of one series, and what there is in it."""

    wanted: dict[str, int]
    num_points: int
    first_step: int
    last_step: int


class MetricStore(MetricReader):
    """The daemon's metric points: the only one that writes them."""

    def __init__(self, path: Path) -> None:
        connection = open_writer(path, is_durable=False)
        try:
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            migrate(connection, "trn.registry.metrics_migrations")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._file = OpenFile(path, is_changed_by_checkpoints_alone=False)
        self.writer = RegistryWriter(
            connection, name="metrics-writer", is_applied_by_caller=False, file=self._file
        )
        super().__init__(path)
        self._places = open_reader(path)  # never behind a long query

    def close(self) -> None:
        self._places.close()
        super().close()
        self.writer.close()

    def place(self, run_id: str) -> Place:
        """How far the run's file is taken in. For one thread."""
        row = self._places.execute(sql("place"), {"run_id": run_id}).fetchone()
        return Place() if row is None else Place(row["offset"], row["last_seq"])

    def add(self, run_id: str, *, offset: int, last_seq: int, points: Sequence[Point]) -> "Future[None]":
        """Points of events in the order of their seq; what the store knows already is left out."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(sql("add_run"), {"run_id": run_id})
            run = connection.execute(sql("run"), {"run_id": run_id}).fetchone()
            if last_seq <= run["last_seq"]:
                return
            fresh = points
            if points and points[0][0] <= run["last_seq"]:
                fresh = [point for point in points if point[0] > run["last_seq"]]
            for attempt, own in groupby(fresh, key=itemgetter(1)):
                _add_points(connection, run["run_key"], attempt, list(own))
            place = {"offset": offset, "last_seq": last_seq}
            connection.execute(sql("move_place"), {"run_key": run["run_key"], **place})

        return self.writer.submit(change)

    def rewind(self, run_id: str, place: Place) -> "Future[None]":
        """The run's file has lost what came after there; numbers of events that follow are used again."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                sql("rewind"), {"run_id": run_id, "offset": place.offset, "last_seq": place.last_seq}
            )

        return self.writer.submit(change)

    def remove(self, run_ids: Sequence[str]) -> "Future[None]":
        """Forget all points of these runs."""

        def change(connection: sqlite3.Connection) -> None:
            for run_id in run_ids:
                for query in ("remove_points", "remove_series", "remove_run"):
                    connection.execute(sql(query), {"run_id": run_id})

        return self.writer.submit(change)

    def run_ids(self) -> list[str]:
        """Every run that has a place here. For the thread of `place`."""
        return [row["run_id"] for row in self._places.execute(sql("run_ids"))]

    def checkpoint_wal(self) -> tuple[int, int, int]:
        """(busy, frames in the log, frames checkpointed), as SQLite says."""

        return self.writer.between(lambda: checkpoint_file(self._connection, self._file)).result()

    def find_problem(self) -> str:
        """Why nothing can be written any more; empty: all is well. Blocks for what is being written."""
        return self.writer.between(self._file.find_problem).result()

    def rescue(self, target: Path) -> None:
        """A copy of what this process has, also where its file was deleted. Blocks."""
        self.writer.between(lambda: copy_to(self._connection, target)).result()


def find_behind(registry: Path, metrics: Path, *, limit: int = MAX_BEHIND) -> list[str]:
    """Ended runs, of the `limit` that changed last, whose events the registry has further than the store. Any thread."""
    with contextlib.closing(open_reader(metrics)) as connection:
        connection.execute("ATTACH DATABASE ? AS registry", (f"{registry.absolute().as_uri()}?mode=ro",))
        return [row["run_id"] for row in connection.execute(sql("behind"), {"limit": limit})]


def _require_few(pieces: "Mapping[str, Sequence[_Piece]]", max_points: int, max_answer: int) -> None:
    num_points = 0
    for those in pieces.values():
        found = sum(piece.num_points for piece in those)
        num_points += min(found, max(max_points, MIN_THINNED * len(those)) if max_points else _NO_STEP)
    if num_points > max_answer:
        raise TooMuchError(
            f"that would be {num_points} points, at most {max_answer} are sent at once: thin them out with"
            " max_points, or ask for fewer names or a range of steps"
        )


def _add_points(connection: sqlite3.Connection, run_key: int, attempt: int, points: list[Point]) -> None:
    first_steps = {name: step for _, _, name, step, _, _ in reversed(points)}
    keys = {
        name: _series_key(connection, {"run_key": run_key, "name": name, "attempt": attempt}, first_step)
        for name, first_step in first_steps.items()
    }
    connection.executemany(
        sql("add_point"), [(keys[name], step, value, ms) for _, _, name, step, value, ms in points]
    )


def _series_key(connection: sqlite3.Connection, wanted: dict[str, str | int], first_step: int) -> int:
    row = connection.execute(sql("one_series"), wanted).fetchone()
    if row is None:
        return int(connection.execute(sql("add_series"), wanted).fetchone()["series_key"])
    key = int(row["series_key"])
    if wanted["attempt"] > row["attempt"]:
        connection.execute(sql("forget_points_from"), {"series_key": key, "step": first_step})
        connection.execute(sql("move_series"), {"series_key": key, "attempt": wanted["attempt"]})
    return key


def _number(value: float | None) -> float:
    return math.nan if value is None else value
