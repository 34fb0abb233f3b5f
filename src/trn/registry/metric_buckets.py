"""Buckets of metric points: a chart of any length reads about as many rows as it has pixels.

Level L divides all steps, from 0 on, into buckets of 2^L steps. A series has the levels from its `finest_level` on, whose
buckets hold about 16 points.

Invariants
- A bucket is stored if and only if it has a point and all its steps are below the series' `built_to`, a multiple of the
  finest width. What is stored is what its points give.
- So a bucket is written once, when the series has passed its end. A point that is appended changes no bucket. What is
  not in a whole bucket (the ends of a range, the newest points) is merged by the query, from finer levels and points.
- A point below `built_to` that is written again rebuilds its bucket of each level.
- Where a later attempt takes back the points from a step on, the buckets that reach beyond it go, too.
- All this commits with the points. A series that is not built as far as it could be is slower to read, not wrong.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from trn.registry.named_queries import metrics_sql as sql

POINTS_IN_FINEST = 16
MAX_POINTS_IN_FINEST = 256  # with more, points came closer together since the levels were chosen
MIN_BUILT = 4  # buckets of the finest level in one change: one by one would cost half as much again
MAX_BUILT = 1 << 16  # points in one change, so that other changes do not wait long
MAX_SERIES = 4  # the same


class Built(NamedTuple):
    """How far the buckets of a series are built."""

    finest_level: int | None = None
    built_to: int = 0


class Span(NamedTuple):
    """Buckets of a level, or with level 0 points by step; the end is not included."""

    level: int
    begin: int
    end: int


def cover(built: Built, begin: int, end: int, max_level: int) -> Iterator[Span]:
    """The fewest buckets and points that hold exactly the steps from `begin` up to, not with, `end`; in order."""
    level = 0
    if built.finest_level is not None and built.finest_level <= max_level:
        level = min(max_level, max(built.built_to.bit_length(), built.finest_level))
    yield from _cover(built, begin, end, level)


def _cover(built: Built, begin: int, end: int, level: int) -> Iterator[Span]:
    if begin >= end:
        return
    if level == 0:
        yield Span(0, begin, end)
        return
    finer = 0 if level == built.finest_level else level - 1
    first, last = -(-begin >> level), min(end, built.built_to) >> level
    if first >= last:
        yield from _cover(built, begin, end, finer)
    else:
        yield from _cover(built, begin, first << level, finer)
        yield Span(level, first, last)
        yield from _cover(built, last << level, end, finer)


def encode(spans: Iterable[Span]) -> str:
    """As the queries take them."""
    return msgspec.json.encode(list(spans)).decode()


def build(connection: sqlite3.Connection, series_key: int, built: Built, last_step: int) -> bool:
    """Build the buckets that the series has passed, some at a time. False: few enough are left to merge in a query."""
    level, begin = built
    if level is None:
        level = _choose_finest(connection, series_key)
        if level is None:
            return False
    elif last_step >> level < (begin >> level) + MIN_BUILT:
        return False
    end = _find_end(connection, series_key, level, begin, last_step >> level << level)
    _build_levels(connection, series_key, level, begin, end)
    wanted = {"series_key": series_key, "level": level, "begin": begin >> level, "end": end >> level}
    most = connection.execute(sql("most_points"), wanted).fetchone()[0] or 0
    if most > MAX_POINTS_IN_FINEST and level > POINTS_IN_FINEST.bit_length() - 1:
        # Begin again, with finer ones.
        connection.execute(sql("remove_buckets_of"), {"series_key": series_key})
        connection.execute(sql("add_unbuilt"), {"series_key": series_key})
        end, level = 0, level - (most // POINTS_IN_FINEST).bit_length() + 1
    _note(connection, series_key, Built(level, end))
    return last_step >> level >= (end >> level) + MIN_BUILT


def rebuild(connection: sqlite3.Connection, series_key: int, built: Built, steps: Sequence[int]) -> None:
    """Points at these steps have changed."""
    level = built.finest_level
    if level is None:
        return
    numbers = {step >> level for step in steps if step < built.built_to}
    query, finer = "build_from_points", 0
    while numbers:
        rows = [
            {
                "series_key": series_key,
                "level": level,
                "finer": finer,
                "begin": number << level - finer,
                "end": number + 1 << level - finer,
            }
            for number in sorted(numbers)
        ]
        connection.executemany(sql(query), rows)
        query, finer, level = "build_from_buckets", level, level + 1
        numbers = {number >> 1 for number in numbers if number >> 1 < built.built_to >> level}


def cut_back(connection: sqlite3.Connection, series_key: int, built: Built, step: int) -> Built:
    """Its points from that step on are gone."""
    level = built.finest_level
    if level is None or step >= built.built_to:
        return built
    levels = range(level, built.built_to.bit_length())
    connection.executemany(
        sql("remove_buckets_from"), [(series_key, level, step >> level) for level in levels]
    )
    return _note(connection, series_key, Built(level, step >> level << level))


def build_unbuilt(connection: sqlite3.Connection) -> bool:
    """Build some buckets of the series that were left without. False: there are no such series."""
    rows = connection.execute(sql("next_unbuilt"), {"limit": MAX_SERIES}).fetchall()
    for row in rows:
        built = Built(row["finest_level"], row["built_to"])
        if row["last_step"] is not None and build(connection, row["series_key"], built, row["last_step"]):
            break  # and more the next time
        connection.execute(sql("remove_unbuilt"), {"series_key": row["series_key"]})
    return bool(rows)


def _choose_finest(connection: sqlite3.Connection, series_key: int) -> int | None:
    """Wide enough for 16 points as far apart as the first ones; None where there are too few to say."""
    wanted = {"series_key": series_key, "limit": POINTS_IN_FINEST + 1}
    row = connection.execute(sql("first_points"), wanted).fetchone()
    if row["num_points"] <= POINTS_IN_FINEST:
        return None
    return int(row["last_step"] - row["first_step"] - 1).bit_length()


def _find_end(connection: sqlite3.Connection, series_key: int, level: int, begin: int, end: int) -> int:
    if end - begin <= MAX_BUILT:
        return end
    wanted = {"series_key": series_key, "begin": begin, "num_points": MAX_BUILT}
    row = connection.execute(sql("step_after"), wanted).fetchone()
    if row is None:
        return end
    return min(end, max(int(row["step"]) >> level, (begin >> level) + 1) << level)


def _build_levels(connection: sqlite3.Connection, series_key: int, level: int, begin: int, end: int) -> None:
    wanted = {"series_key": series_key, "level": level, "begin": begin, "end": end}
    connection.execute(sql("build_from_points"), wanted)
    while end >> level + 1 > begin >> level + 1:
        finer, level = level, level + 1
        wanted = {
            "series_key": series_key,
            "level": level,
            "finer": finer,
            "begin": begin >> level << 1,
            "end": end >> level << 1,
        }
        connection.execute(sql("build_from_buckets"), wanted)


def _note(connection: sqlite3.Connection, series_key: int, built: Built) -> Built:
    connection.execute(sql("note_built"), {"series_key": series_key, **built._asdict()})
    return built
