"""Curves of metric points: of each series in a range of steps all points, or as many buckets as fit.

A query that merges reads one level, that of the answer, and at the ends of the range some finer ones. Where the answer's
buckets are finer than all that is stored, it reads points: at most about 16 for each point of the answer.

Two runs are compared by SQLite, which walks both curves: no point becomes a Python object, and other threads run meanwhile.
"""

import math
import sqlite3
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from trn.core.errors import TooMuchError
from trn.core.runs import LineagePart
from trn.registry.discarded_points import TIMED
from trn.registry.metric_buckets import Built, Span, cover, encode
from trn.registry.named_queries import metrics_sql as sql

MIN_THINNED = 3  # the first, the last, and one for all between

MAX_LEVEL = 63  # one bucket for all steps

_NO_STEP = (1 << 63) - 1


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one name, by step. With a `width` above 1 each stands for those of its bucket, which are merged."""

    name: str
    steps: list[int]
    values: list[float]
    timestamps_ms: list[int]
    num_points: int  # that there are in the range
    lows: list[float] = []  # only where merged: the min of each bucket, NaN where it has no number
    highs: list[float] = []
    counts: list[int] = []  # points of each
    width: int = 1  # of a bucket, in steps


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

    @property
    def steps(self) -> tuple[int, int]:
        """Both included, and as SQLite can hold them."""
        return (
            0 if self.from_step is None else min(self.from_step, _NO_STEP),
            _NO_STEP if self.to_step is None else min(self.to_step, _NO_STEP),
        )


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


class Piece(NamedTuple):
    """A stretch of one series, and what there is in it."""

    series_key: int
    built: Built
    num_points: int
    first_step: int
    last_step: int


# step, value, timestamp_ms, low, high, num_points; None for what is not a number
_Row = tuple[int, float | None, int, float | None, float | None, int]


def find_series(connection: sqlite3.Connection, run_id: str, names: Sequence[str] = ()) -> list[sqlite3.Row]:
    encoded = msgspec.json.encode(list(names)).decode()
    return connection.execute(sql("series"), {"run_id": run_id, "names": encoded}).fetchall()


def find_pieces(
    connection: sqlite3.Connection, stretches: Sequence[Stretch], names: Sequence[str]
) -> dict[str, list[Piece]]:
    """Where the points are, by name; only what has any."""
    pieces: dict[str, list[Piece]] = {}
    for stretch in stretches:
        from_step, to_step = stretch.steps
        for row in find_series(connection, stretch.run_id, names):
            wanted = {"series_key": row["series_key"], "from_step": from_step, "to_step": to_step}
            first_step, last_step = connection.execute(sql("extent"), wanted).fetchone()
            if first_step is None:
                continue
            built = Built(row["finest_level"], row["built_to"])
            spans = encode(cover(built, first_step, last_step + 1, MAX_LEVEL))
            wanted = {"series_key": row["series_key"], "spans": spans}
            num_points = connection.execute(sql("num_points"), wanted).fetchone()[0]
            piece = Piece(row["series_key"], built, num_points, first_step, last_step)
            pieces.setdefault(row["name"], []).append(piece)
    return pieces


def require_few(curves: Iterable[Sequence[Piece]], max_points: int, max_answer: int | None) -> None:
    """TooMuchError where these curves would have more points than that in all."""
    num_points = 0
    for pieces in curves:
        found = sum(piece.num_points for piece in pieces)
        num_points += min(found, _budget(pieces, max_points)) if max_points else found
    require_answer(num_points, max_answer)


def require_answer(num_points: int, max_answer: int | None) -> None:
    if max_answer is not None and num_points > max_answer:
        raise TooMuchError(
            f"that would be {num_points} points, at most {max_answer} are sent at once: thin them out with"
            " max_points, or ask for fewer names or a range of steps"
        )


def read_curve(connection: sqlite3.Connection, name: str, pieces: Sequence[Piece], max_points: int) -> Series:
    """The points of all pieces, merged where there are more than `max_points` (0: as many as there are)."""
    num_points = sum(piece.num_points for piece in pieces)
    budget = _budget(pieces, max_points)
    is_merged = bool(max_points) and num_points > budget
    level = 0
    if is_merged:
        level, rows = _read_merged(connection, pieces, budget)
    else:
        rows = [row for piece in pieces for row in _read_points(connection, piece)]
    steps, values, timestamps_ms, lows, highs, counts = map(list, zip(*rows, strict=True))
    return Series(
        name=name,
        steps=steps,
        values=_numbers(values),
        timestamps_ms=timestamps_ms,
        num_points=num_points,
        lows=_numbers(lows) if is_merged else [],
        highs=_numbers(highs) if is_merged else [],
        counts=counts if is_merged else [],
        width=1 << level,
    )


def _budget(pieces: Sequence[Piece], max_points: int) -> int:
    return max(max_points, MIN_THINNED * len(pieces))


def _read_merged(
    connection: sqlite3.Connection, pieces: Sequence[Piece], budget: int
) -> tuple[int, list[_Row]]:
    """At the finest level that is known to have no more buckets than that."""
    level = _choose_level(pieces, budget)
    while True:
        rows = [row for piece in pieces for row in _read_buckets(connection, piece, level)]
        finer = _choose_finer([row[5] for row in rows], level, budget)
        if finer == level:
            return level, rows
        level = finer


def _choose_level(pieces: Sequence[Piece], budget: int) -> int:
    """The finest that would do with a point at every step."""

    def max_rows(piece: Piece, level: int) -> int:
        num_buckets = (piece.last_step - 1 >> level) - (piece.first_step + 1 >> level) + 1
        return min(2 + max(num_buckets, 0), piece.num_points)

    for level in range(1, MAX_LEVEL):
        if sum(max_rows(piece, level) for piece in pieces) <= budget:
            return level
    return MAX_LEVEL


def _choose_finer(counts: Sequence[int], level: int, budget: int) -> int:
    """The finest that would do whatever the steps are: a bucket of n points is divided in n at most. For steps far apart."""
    for shift in range(1, level):
        if sum(min(count, 1 << shift) for count in counts) > budget:
            return level - shift + 1
    return 1


def _read_points(connection: sqlite3.Connection, piece: Piece) -> list[_Row]:
    wanted = {"series_key": piece.series_key, "from_step": piece.first_step, "to_step": piece.last_step}
    return [(*row, row[1], row[1], 1) for row in connection.execute(sql("points"), wanted)]


def _read_buckets(connection: sqlite3.Connection, piece: Piece, level: int) -> list[_Row]:
    """The first point, the buckets between, the last point."""
    if piece.num_points <= MIN_THINNED:
        return _read_points(connection, piece)
    first, last = (
        _read_points(connection, piece._replace(first_step=step, last_step=step))
        for step in (piece.first_step, piece.last_step)
    )
    spans = list(cover(piece.built, piece.first_step + 1, piece.last_step, level))
    wanted = {"series_key": piece.series_key, "level": level}
    parts = encode(span for span in spans if span.level != level)
    rows: list[_Row] = connection.execute(sql("merged"), {**wanted, "spans": parts}).fetchall()
    for span in spans:
        if span.level == level:  # whole buckets, as they are
            rows += connection.execute(sql("buckets"), {**wanted, "begin": span.begin, "end": span.end})
    return [*first, *sorted(rows, key=itemgetter(0)), *last]


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def find_extremes(connection: sqlite3.Connection, piece: Piece) -> Extremes:
    """Of its finite values. From the widest bucket that has it down to the point; infinities take a look at all points."""
    spans = list(cover(piece.built, piece.first_step, piece.last_step + 1, MAX_LEVEL))
    parts = _read_parts(connection, piece, spans)
    if not parts:
        return Extremes()
    if any(math.isinf(part["low"]) or math.isinf(part["high"]) for part in parts):
        wanted = {"series_key": piece.series_key, "from_step": piece.first_step, "to_step": piece.last_step}
        return Extremes(*connection.execute(sql("extremes"), wanted).fetchone())
    low, high = min(part["low"] for part in parts), max(part["high"] for part in parts)
    low_step = _find_first(connection, piece, parts, "low", low)
    high_step = _find_first(connection, piece, parts, "high", high)
    return Extremes(low, low_step, high, high_step)


def _read_parts(connection: sqlite3.Connection, piece: Piece, spans: Sequence[Span]) -> list[sqlite3.Row]:
    """Buckets and points in order; without those that have no number."""
    wanted = {"series_key": piece.series_key, "spans": encode(spans)}
    return connection.execute(sql("parts"), wanted).fetchall()


def _find_first(
    connection: sqlite3.Connection, piece: Piece, parts: Sequence[sqlite3.Row], column: str, value: float
) -> int:
    """The first step with that value, which one of the parts has."""
    found = next(part for part in parts if part[column] == value)
    level, place = found["level"], found["place"]
    if level == 0:
        return int(place)
    spans = list(cover(piece.built, place << level, place + 1 << level, level - 1))
    return _find_first(connection, piece, _read_parts(connection, piece, spans), column, value)


# --- two runs beside each other ------------------------------------------------------------------------------------


class Agreement(NamedTuple):
    """How far two runs agree, over all metrics that do not measure time."""

    num_common: int = 0  # steps at which both have a value of the same metric
    metric: str = ""  # that differs first; empty: none does
    step: int = 0  # of the first difference
    values: tuple[float, float] = (math.nan, math.nan)  # there
    num_equal: int = 0  # steps before it at which both have the metric, with the same value


def compare_curves(connection: sqlite3.Connection, one: str, other: str) -> Agreement:
    """Of two runs by their ids. Steps that only one of them has tell nothing; NaN is equal to NaN."""
    rows = connection.execute(sql("common_series"), {"one": one, "other": other}).fetchall()
    pairs = {
        row["name"]: {"one": row["one_key"], "other": row["other_key"]}
        for row in rows
        if not row["name"].startswith(TIMED)
    }
    earliest = Agreement(step=_NO_STEP)
    for name, pair in pairs.items():
        found = connection.execute(sql("first_difference"), {**pair, "before": earliest.step}).fetchone()
        if found is not None:
            one_value, other_value = _numbers([found["one"], found["other"]])
            earliest = Agreement(metric=name, step=found["step"], values=(one_value, other_value))
    num_common = _count_common(connection, list(pairs.values()))
    if not earliest.metric:
        return Agreement(num_common=num_common)
    num_equal = _count_before(connection, pairs[earliest.metric], earliest.step)
    return earliest._replace(num_common=num_common, num_equal=num_equal)


def _count_common(connection: sqlite3.Connection, pairs: list[dict[str, int]]) -> int:
    if len(pairs) == 1:
        return _count_before(connection, pairs[0], _NO_STEP)
    encoded = msgspec.json.encode(pairs).decode()
    return int(connection.execute(sql("num_common"), {"pairs": encoded}).fetchone()[0])


def _count_before(connection: sqlite3.Connection, pair: dict[str, int], step: int) -> int:
    return int(connection.execute(sql("num_common_before"), {**pair, "before": step}).fetchone()[0])
