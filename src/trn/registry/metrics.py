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
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from trn.core.errors import NotFoundError, TooMuchError
from trn.registry.connection import checkpoint, migrate, open_reader, open_writer
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


class MetricReader:
    """Reads of the metric points; any thread."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise NotFoundError(f"there are no metrics at {path}: no run has reported any yet")
        self._read = open_reader(path)
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
        steps = {
            "from_step": 0 if from_step is None else min(from_step, _NO_STEP),
            "to_step": _NO_STEP if to_step is None else min(to_step, _NO_STEP),
        }
        wanted = {"run_id": run_id, "names": msgspec.json.encode(list(names)).decode()}
        with self._reading:
            self._read.execute("BEGIN")  # one state of the file for all that follows
            try:
                rows = self._read.execute(sql("series"), wanted).fetchall()
                if max_answer is not None:
                    self._require_few([row["series_key"] for row in rows], steps, max_points, max_answer)
                found = [
                    self._series(row["name"], {"series_key": row["series_key"], **steps}, max_points)
                    for row in rows
                ]
            finally:
                self._read.execute("COMMIT")
        return [series for series in found if series.num_points]

    def extremes(self, run_id: str) -> dict[str, Extremes]:
        """Of each of the run's metrics, over all its points."""
        with self._reading:
            rows = self._read.execute(sql("extremes"), {"run_id": run_id}).fetchall()
        return {row["name"]: Extremes(*(row[name] for name in Extremes._fields)) for row in rows}

    def _require_few(self, keys: list[int], steps: dict[str, int], max_points: int, max_answer: int) -> None:
        num_points = 0
        for key in keys:
            extent = self._read.execute(sql("extent"), {"series_key": key, **steps}).fetchone()
            num_points += min(extent["num_points"], max(max_points, MIN_THINNED) if max_points else _NO_STEP)
        if num_points > max_answer:
            raise TooMuchError(
                f"that would be {num_points} points, at most {max_answer} are sent at once: thin them out with"
                " max_points, or ask for fewer names or a range of steps"
            )

    def _series(self, name: str, wanted: dict[str, int], max_points: int) -> Series:
        extent = self._read.execute(sql("extent"), wanted).fetchone()
        is_thinned = 0 < max(max_points, MIN_THINNED if max_points else 0) < extent["num_points"]
        if is_thinned:
            ends = {"first_step": extent["first_step"], "last_step": extent["last_step"]}
            buckets = {**wanted, **ends, "num_buckets": max(max_points, MIN_THINNED) - 2}
            del buckets["from_step"], buckets["to_step"]
            rows = self._read.execute(sql("thinned_points"), buckets).fetchall()
        else:
            rows = self._read.execute(sql("points"), wanted).fetchall()
        return Series(
            name=name,
            steps=[row[0] for row in rows],
            values=[_number(row[1]) for row in rows],
            timestamps_ms=[row[2] for row in rows],
            num_points=extent["num_points"],
            lows=[_number(row[3]) for row in rows] if is_thinned else [],
            highs=[_number(row[4]) for row in rows] if is_thinned else [],
        )


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
        self.writer = RegistryWriter(connection, name="metrics-writer", is_applied_by_caller=False)
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

        return self.writer.between(lambda: checkpoint(self._connection)).result()


def find_behind(registry: Path, metrics: Path, *, limit: int = MAX_BEHIND) -> list[str]:
    """Ended runs, of the `limit` that changed last, whose events the registry has further than the store. Any thread."""
    with contextlib.closing(open_reader(metrics)) as connection:
        connection.execute("ATTACH DATABASE ? AS registry", (f"{registry.absolute().as_uri()}?mode=ro",))
        return [row["run_id"] for row in connection.execute(sql("behind"), {"limit": limit})]


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
