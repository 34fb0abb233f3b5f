"""Metric points that a later attempt took back: it resumed before them, and trained their steps again.

They are kept apart from the points, with the attempt that wrote them: charts can show them, and a step that was trained
twice shows whether the resume was exact.

Invariant: of a series at most `MAX_DISCARDED` are kept, and its first step with two values stays among them. Those of
the oldest attempts go first, of one attempt those of the highest steps. How many went is in `num_dropped`.
"""

import math
import sqlite3
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import msgspec

from trn.registry.named_queries import metrics_sql as sql

MAX_DISCARDED = 10_000  # of a series
# Timings: they differ even between bit-exact runs.
TIMED = ("throughput/", "time/", "system/", "gpu/", "memory/")


class Discarded(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one metric that one attempt reported and a later attempt took back."""

    run_id: str
    name: str
    attempt: int
    steps: list[int]
    values: list[float]
    timestamps_ms: list[int]
    num_points: int  # that are kept, in the range
    num_dropped: int  # of this metric, all attempts: not kept, because at most 10,000 are


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The first step that was trained twice with two values."""

    step: int
    name: str
    before: float
    after: float


class RepeatedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that were trained more than once, as far as metrics were reported and kept of them. Timings do not count."""

    num_steps: int = 0
    num_dropped: int = 0  # discarded points that were not kept, and may not have been compared
    drift: Drift | None = None

    @property
    def exactness(self) -> str:
        """`exact`: every step that was trained twice has equal values; `drifted`: one has not; empty: there is none."""
        if self.drift is not None:
            return "drifted"
        return "exact" if self.num_steps else ""

    @property
    def text(self) -> str:
        """One line for people; empty where no step was trained twice."""
        if self.drift is not None:
            drift = self.drift
            return f"drifted at step {drift.step}: {drift.name} was {drift.before!r} and is {drift.after!r} after the resume"
        if not self.num_steps:
            return ""
        steps = "1 step was" if self.num_steps == 1 else f"{self.num_steps} steps were"
        return f"exact: {steps} trained twice, all metrics are equal"


class SeriesRow(NamedTuple):
    """A series, as far as its discarded points are concerned."""

    series_key: int
    name: str
    num_dropped: int


def take_back(connection: sqlite3.Connection, series_key: int, attempt: int, step: int) -> None:
    """Move its points from that step on. `attempt`: whose they are where they do not say."""
    _, drift_step = _find_repeats(connection, [series_key])
    wanted = {
        "series_key": series_key,
        "attempt": attempt,
        "step": step,
        "kept_step": -1 if drift_step is None else drift_step,
        "limit": MAX_DISCARDED,
    }
    num_kept = connection.execute(sql("discard_points"), wanted).rowcount
    num_points = connection.execute(sql("remove_points_from"), wanted).rowcount
    num_excess = connection.execute(sql("remove_excess"), wanted).rowcount
    num_dropped = num_points - num_kept + num_excess
    if num_dropped:
        connection.execute(sql("note_dropped"), {"series_key": series_key, "num_dropped": num_dropped})


def read_discarded(
    connection: sqlite3.Connection,
    run_id: str,
    series: Sequence[SeriesRow],
    steps: tuple[int, int],
    max_points: int,
) -> list[Discarded]:
    """By name and attempt; each of at most `max_points` points (0: all that are kept)."""
    found = []
    for series_key, name, num_dropped in series:
        wanted = {"series_key": series_key, "from_step": steps[0], "to_step": steps[1]}
        rows = connection.execute(sql("discarded"), wanted)
        for attempt, own in groupby(rows, key=itemgetter(0)):
            points = [tuple(row)[1:] for row in own]
            shown = _thin(points, max_points)
            found.append(
                Discarded(
                    run_id=run_id,
                    name=name,
                    attempt=attempt,
                    steps=[step for step, _, _ in shown],
                    values=[math.nan if value is None else value for _, value, _ in shown],
                    timestamps_ms=[ms for _, _, ms in shown],
                    num_points=len(points),
                    num_dropped=num_dropped,
                )
            )
    return found


_Row = tuple[int, float | None, int]  # step, value, timestamp_ms


def _thin(points: list[_Row], max_points: int) -> list[_Row]:
    """Of each bucket its last point, or its last that is not a number."""
    level = 0
    while max_points and len({step >> level for step, _, _ in points}) > max_points:
        level += 1
    shown: dict[int, _Row] = {}
    for row in points:
        before = shown.get(row[0] >> level)
        if before is None or before[1] is not None or row[1] is None:
            shown[row[0] >> level] = row
    return list(shown.values())


def compare_repeated(connection: sqlite3.Connection, series: Sequence[SeriesRow]) -> RepeatedSteps:
    """Compare what was discarded with what was reported of the same steps later."""
    compared = [row for row in series if not row.name.startswith(TIMED)]
    keys = [row.series_key for row in compared]
    num_steps, drift_step = _find_repeats(connection, keys)
    return RepeatedSteps(
        num_steps=num_steps,
        num_dropped=sum(row.num_dropped for row in compared),
        drift=None if drift_step is None else _read_drift(connection, compared, drift_step),
    )


def _find_repeats(connection: sqlite3.Connection, keys: Sequence[int]) -> tuple[int, int | None]:
    """(steps with more than one value, the first at which they differ)"""
    encoded = msgspec.json.encode(list(keys)).decode()
    row = connection.execute(sql("repeated_steps"), {"keys": encoded}).fetchone()
    return row["num_steps"], row["drift_step"]


def _read_drift(connection: sqlite3.Connection, series: Sequence[SeriesRow], step: int) -> Drift | None:
    for series_key, name, _ in series:
        rows = connection.execute(sql("values_at"), {"series_key": series_key, "step": step}).fetchall()
        values = [math.nan if value is None else value for (value,) in rows]
        for before, after in pairwise(values):
            if before != after and not (math.isnan(before) and math.isnan(after)):
                return Drift(step=step, name=name, before=before, after=after)
    return None
