"""Metric points: a file of their own, so that a flood of them delays no change of a run.

Invariants
- How far a run's events file has been taken in commits with the points of it. The file is synced lazily, so a power
  cut may take its last commits; it then is behind the registry, never inconsistent, and ingest catches it up.
- Events up to `last_seq` are known: a batch that is repeated, wholly or in part, adds nothing twice.
- A series has one point for a step: the newest. The first point of a later attempt, at step s, takes away what earlier
  attempts left in that series from s on: the model went back, and so does its history. What it took away is kept apart
  (see `discarded_points`).
- Buckets of points (see `metric_buckets`) commit with the points that they are made of.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from trn.core.errors import NotFoundError, RegistryError
from trn.registry.connection import (
    OpenFile,
    checkpoint_file,
    copy_to,
    is_older,
    migrate,
    open_reader,
    open_writer,
)
from trn.registry.discarded_points import (
    Discarded,
    RepeatedSteps,
    SeriesRow,
    compare_repeated,
    read_discarded,
    take_back,
)
from trn.registry.metric_buckets import Built, build, build_unbuilt, cut_back, rebuild
from trn.registry.metric_curves import (
    Agreement,
    Extremes,
    Series,
    Stretch,
    compare_curves,
    find_extremes,
    find_pieces,
    find_series,
    line_of_descent,
    read_curve,
    require_answer,
    require_few,
)
from trn.registry.named_queries import metrics_sql as sql
from trn.registry.writer import RegistryWriter

__all__ = [
    "Agreement",
    "Discarded",
    "Extremes",
    "MetricReader",
    "MetricStore",
    "Place",
    "Point",
    "RepeatedSteps",
    "Series",
    "Stretch",
    "find_behind",
    "line_of_descent",
]

MIGRATIONS = "trn.registry.metrics_migrations"
WAL_PAGES = 4000  # 16 MB; maintenance comes by too rarely for what a flood of points leaves in the log
MAX_BEHIND = (
    1000  # runs that a power cut, or a daemon that was killed on a full disk, may have left without points
)

# (seq, attempt, name, step, value, timestamp_ms): plain tuples, there are very many
Point = tuple[int, int, str, int, float, int]


class Place(NamedTuple):
    """How far a run's events file has been taken in."""

    offset: int = 0
    last_seq: int = 0


class MetricReader:
    """Reads of the metric points; any thread."""

    def __init__(self, source: Path | sqlite3.Connection) -> None:
        """Of a file, or over a connection that is open: it is closed with this."""
        if isinstance(source, Path) and not source.exists():
            raise NotFoundError(f"there are no metrics at {source}: no run has reported any yet")
        self._read = source if isinstance(source, sqlite3.Connection) else open_reader(source)
        self._reading = threading.Lock()
        if is_older(self._read, MIGRATIONS):
            self._read.close()
            raise RegistryError(
                f"{source if isinstance(source, Path) else 'metrics.db'} was written by an older trn: `trn daemon start`"
                " brings it up to date"
            )

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

        More points than that are merged in buckets of equal width, a power of two, counted from step 0. Of each bucket
        there are its last point, or its last that is not a number, the min and the max of its numbers, and its number
        of points. The first and the last point stay as they are, and their buckets are without them.
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
        """As `query`, of several runs as one curve: the stretches follow each other. Where merged, each has at least 3
        points.
        """
        with self._one_state():
            pieces = find_pieces(self._read, stretches, names)
            require_few(pieces.values(), max_points, max_answer)
            return [read_curve(self._read, name, pieces[name], max_points) for name in sorted(pieces)]

    def query_runs(
        self,
        run_ids: Sequence[str],
        names: Sequence[str] = (),
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        max_answer: int | None = None,
    ) -> dict[str, list[Series]]:
        """As `query`, of each of these runs, from one state of the store."""
        with self._one_state():
            runs = {
                run_id: find_pieces(self._read, [Stretch(run_id, from_step, to_step)], names)
                for run_id in dict.fromkeys(run_ids)
            }
            curves = [pieces for found in runs.values() for pieces in found.values()]
            require_few(curves, max_points, max_answer)
            return {
                run_id: [read_curve(self._read, name, found[name], max_points) for name in sorted(found)]
                for run_id, found in runs.items()
            }

    def discarded(
        self,
        stretches: Sequence[Stretch],
        names: Sequence[str] = (),
        max_points: int = 0,
        max_answer: int | None = None,
    ) -> list[Discarded]:
        """Points that later attempts took back, by run, name and attempt, each of at most `max_points` points (0: all).

        At most 10,000 are kept of each series. TooMuchError as in `query`.
        """
        found = []
        with self._one_state():
            for stretch in stretches:
                series = [_series_row(row) for row in find_series(self._read, stretch.run_id, names)]
                found += read_discarded(self._read, stretch.run_id, series, stretch.steps, max_points)
        require_answer(sum(len(part.steps) for part in found), max_answer)
        return found

    def repeated_steps(self, run_id: str) -> RepeatedSteps:
        """Of the run's steps that were trained twice: are their metrics equal, or which is the first that is not?"""
        with self._one_state():
            return compare_repeated(self._read, [_series_row(row) for row in find_series(self._read, run_id)])

    def compare(self, one: str, other: str) -> Agreement:
        """How far the metrics of two runs agree. Takes about 0.2 s for a million steps that both have."""
        with self._one_state():
            return compare_curves(self._read, one, other)

    @contextlib.contextmanager
    def _one_state(self) -> Iterator[None]:
        """One state of the file for all that is read within."""
        with self._reading:
            self._read.execute("BEGIN")
            try:
                yield
            finally:
                self._read.execute("COMMIT")

    def extremes(self, run_id: str) -> dict[str, Extremes]:
        """Of each of the run's metrics, over all its points."""
        with self._one_state():
            pieces = find_pieces(self._read, [Stretch(run_id)], ())
            return {name: find_extremes(self._read, *found) for name, found in pieces.items()}


class MetricStore(MetricReader):
    """The daemon's metric points: the only one that writes them."""

    def __init__(self, path: Path) -> None:
        connection = open_writer(path, is_durable=False)
        try:
            connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            migrate(connection, MIGRATIONS)
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
                for part in (
                    "run_points",
                    "run_buckets",
                    "run_discarded",
                    "run_unbuilt",
                    "run_series",
                    "run",
                ):
                    connection.execute(sql(f"remove_{part}"), {"run_id": run_id})

        return self.writer.submit(change)

    def build_more(self) -> "Future[bool]":
        """Build some buckets of points that an older release stored without. False: there is nothing to build."""
        return self.writer.submit(build_unbuilt)

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


def _series_row(row: sqlite3.Row) -> SeriesRow:
    return SeriesRow(row["series_key"], row["name"], row["num_dropped"])


def _add_points(connection: sqlite3.Connection, run_key: int, attempt: int, points: list[Point]) -> None:
    steps: dict[str, list[int]] = {}
    for _, _, name, step, _, _ in points:
        steps.setdefault(name, []).append(step)
    series = {
        name: _open_series(connection, {"run_key": run_key, "name": name, "attempt": attempt}, own[0])
        for name, own in steps.items()
    }
    connection.executemany(
        sql("add_point"),
        [(series[name][0], step, value, ms, attempt) for _, _, name, step, value, ms in points],
    )
    for name, own in steps.items():
        key, built = series[name]
        if min(own) < built.built_to:
            rebuild(connection, key, built, own)
        build(connection, key, built, max(own))


def _open_series(
    connection: sqlite3.Connection, wanted: dict[str, str | int], first_step: int
) -> tuple[int, Built]:
    row = connection.execute(sql("one_series"), wanted).fetchone()
    if row is None:
        return int(connection.execute(sql("add_series"), wanted).fetchone()["series_key"]), Built()
    key, built = int(row["series_key"]), Built(row["finest_level"], row["built_to"])
    if wanted["attempt"] > row["attempt"]:
        take_back(connection, key, row["attempt"], first_step)
        connection.execute(sql("move_series"), {"series_key": key, "attempt": wanted["attempt"]})
        built = cut_back(connection, key, built, first_step)
    return key, built
