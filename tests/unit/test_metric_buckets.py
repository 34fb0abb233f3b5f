"""Buckets of metric points: always what the points give, and a query costs what it shows, not what is stored."""

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn.core.errors import RegistryError, TooMuchError
from trn.registry import metric_buckets
from trn.registry.connection import open_writer
from trn.registry.metrics import MetricReader, MetricStore, Place, Point, Series, Stretch

NAN, INF = math.nan, math.inf
VALUES = [0.5, 0.25, -1.0, NAN, INF, -INF, 2.0, 1e300]

Points = Mapping[int, float]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetricStore]:
    store = MetricStore(tmp_path / "metrics.db")
    yield store
    store.close()


def fill(store: MetricStore, run_id: str, num_steps: int, *, names: tuple[str, ...] = ("loss",)) -> None:
    size = 10_000
    for begin in range(0, num_steps, size):
        steps = range(begin, min(begin + size, num_steps))
        points = [
            (step + 1, 1, name, step, (step * 7919 % 1000) / 1000, step) for step in steps for name in names
        ]
        store.add(run_id, offset=steps[-1], last_seq=steps[-1] + 1, points=points).result()


def is_same(one: float | None, other: float | None) -> bool:
    one, other = NAN if one is None else one, NAN if other is None else other
    return one == other or (math.isnan(one) and math.isnan(other))


def merge(points: Points, level: int) -> dict[int, tuple[int, float, float, float, int]]:
    """bucket -> (step that is shown, its value, min, max, number of points), from the points alone."""
    merged = {}
    for bucket, steps in groupby(sorted(points), key=lambda step: step >> level):
        own = list(steps)
        numbers = [points[step] for step in own if not math.isnan(points[step])]
        shown = max((step for step in own if math.isnan(points[step])), default=own[-1])
        merged[bucket] = shown, points[shown], min(numbers, default=NAN), max(numbers, default=NAN), len(own)
    return merged


def check_buckets(path: Path) -> int:
    """What is stored is what the points give; returns the number of buckets."""
    connection = sqlite3.connect(path)
    num_buckets = 0
    for key, finest, built_to in connection.execute("SELECT series_key, finest_level, built_to FROM series"):
        rows = connection.execute("SELECT step, value FROM points WHERE series_key = ?", (key,))
        points = {step: NAN if value is None else value for step, value in rows}
        expected: dict[tuple[int, int], tuple[int, float, float, float, int]] = {}
        levels = range(64 if finest is None else finest, built_to.bit_length())
        for level in levels:
            whole = {step: value for step, value in points.items() if step < built_to >> level << level}
            expected |= {(level, bucket): row for bucket, row in merge(whole, level).items()}
        found = {
            (row[0], row[1]): row[2:]
            for row in connection.execute(
                "SELECT level, bucket, step, value, low, high, num_points FROM buckets WHERE series_key = ?",
                (key,),
            )
        }
        assert found.keys() == expected.keys()
        for place, row in found.items():
            assert all(map(is_same, row, expected[place])), (place, row, expected[place])
        num_buckets += len(found)
    assert connection.execute("SELECT count(*) FROM buckets").fetchone()[0] == num_buckets
    connection.close()
    return num_buckets


def check_series(series: Series, points: Points, max_points: int) -> None:
    steps = sorted(points)
    assert series.num_points == len(steps)
    if series.width == 1:
        assert series.steps == steps
        assert all(map(is_same, series.values, map(points.__getitem__, steps)))
        assert series.counts == series.lows == series.highs == []
        return
    assert len(series.steps) <= max(max_points, 3) < len(steps)
    assert (series.steps[0], series.steps[-1]) == (steps[0], steps[-1])
    first, last = ((step, points[step], points[step], points[step], 1) for step in (steps[0], steps[-1]))
    between = merge({step: points[step] for step in steps[1:-1]}, series.width.bit_length() - 1)
    rows = zip(series.steps, series.values, series.lows, series.highs, series.counts, strict=True)
    for found, expected in zip(rows, [first, *between.values(), last], strict=True):
        assert all(map(is_same, found, expected)), (found, expected)


class Model:
    """What the store must have, kept as simply as can be."""

    def __init__(self) -> None:
        self.points: dict[str, dict[int, float]] = {}
        self.discarded: dict[tuple[str, int, int], float] = {}
        self.owners: dict[tuple[str, int], int] = {}
        self.attempts: dict[str, int] = {}

    def add(self, attempt: int, batch: list[tuple[str, int, float]]) -> None:
        for name, step, value in batch:
            points = self.points.setdefault(name, {})
            if attempt > self.attempts.setdefault(name, attempt):
                self.attempts[name] = attempt
                for taken in [taken for taken in points if taken >= step]:
                    self.discarded[name, self.owners[name, taken], taken] = points.pop(taken)
            points[step] = value
            self.owners[name, step] = attempt


batches = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["go on", "go on", "go on", "attempt", "repeat", "rewind", "anywhere"]),
        "start": st.integers(0, 400),
        "stride": st.sampled_from([1, 1, 1, 2, 7, 64, 1 << 30]),
        "length": st.integers(1, 80),
        "names": st.sampled_from([("loss",), ("loss", "val")]),
        "salt": st.integers(0, 1000),
    }
)


@settings(max_examples=60, deadline=None)
@given(ops=st.lists(batches, min_size=1, max_size=8), data=st.data())
def test_buckets_are_what_the_points_give_after_any_adds_repeats_rewinds_and_attempts(
    tmp_path_factory: pytest.TempPathFactory, ops: list[dict[str, Any]], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric_buckets, "POINTS_IN_FINEST", 2)
        values = data.draw(st.sampled_from([VALUES, VALUES[:4], [0.5, -1.0, 2.0, 0.25, -1.0, 2.0], [NAN]]))
        patch.setattr(metric_buckets, "MAX_POINTS_IN_FINEST", 8)
        patch.setattr(metric_buckets, "MIN_BUILT", data.draw(st.sampled_from([1, 2])))
        patch.setattr(metric_buckets, "MAX_BUILT", data.draw(st.sampled_from([16, 1 << 16])))
        path = tmp_path_factory.mktemp("metrics") / "metrics.db"
        store = MetricStore(path)
        try:
            model = apply(store, ops, values)
            check_buckets(path)
            check_answers(store, model, data.draw)
            check_extremes(store, model)
            while store.build_more().result():
                pass
            check_buckets(path)
            store.remove(["r"]).result()
            assert check_buckets(path) == 0
        finally:
            store.close()


def apply(store: MetricStore, ops: list[dict[str, Any]], values: Sequence[float]) -> Model:
    model, attempt, seq, next_step = Model(), 1, 0, 0
    last: tuple[int, list[Point]] = 0, []
    for op in ops:
        if op["kind"] == "repeat" and last[1]:
            store.add("r", offset=seq, last_seq=seq, points=last[1]).result()
            continue
        if op["kind"] == "rewind" and last[1]:
            seq = last[0]
            store.rewind("r", Place(seq, seq)).result()
        attempt += op["kind"] == "attempt"
        start = next_step if op["kind"] == "go on" else op["start"]
        steps = range(start, start + op["stride"] * op["length"], op["stride"])
        batch = [
            (name, step, values[(step + op["salt"]) * 31 % len(values)])
            for step in steps
            for name in op["names"]
        ]
        points = [
            (number, attempt, name, step, value, step)
            for number, (name, step, value) in enumerate(batch, seq + 1)
        ]
        last, seq, next_step = (seq, points), seq + len(points), steps[-1] + op["stride"]
        store.add("r", offset=seq, last_seq=seq, points=points).result()
        model.add(attempt, batch)
    return model


def check_answers(store: MetricStore, model: Model, draw: Callable[..., Any]) -> None:
    max_points = draw(st.integers(1, 60))
    begin, end = draw(st.integers(0, 500)), draw(st.sampled_from([None, 200, 600, 1 << 36]))
    for from_step, to_step in ((None, None), (begin, end)):
        wanted = {
            name: {s: v for s, v in points.items() if s >= (from_step or 0) and s <= (to_step or 1 << 62)}
            for name, points in model.points.items()
        }
        answer = {series.name: series for series in store.query("r", (), from_step, to_step, max_points)}
        assert answer.keys() == {name for name, points in wanted.items() if points}
        for name, series in answer.items():
            check_series(series, wanted[name], max_points)
    found = {
        (part.name, part.attempt, step): value
        for part in store.discarded([Stretch("r")])
        for step, value in zip(part.steps, part.values, strict=True)
    }
    assert found.keys() == model.discarded.keys()
    assert all(is_same(value, model.discarded[place]) for place, value in found.items())


def check_extremes(store: MetricStore, model: Model) -> None:
    found = store.extremes("r")
    assert found.keys() == model.points.keys()
    for name, points in model.points.items():
        finite = {step: value for step, value in points.items() if math.isfinite(value)}
        low, high = min(finite.values(), default=None), max(finite.values(), default=None)
        steps = [min((s for s, v in finite.items() if v == value), default=None) for value in (low, high)]
        assert found[name] == (low, steps[0], high, steps[1])


def count_work(reader: MetricReader, read: Callable[[], object]) -> int:
    """Instructions of SQLite's machine: what a query costs, on any machine, at any load."""
    num = 0

    def tick() -> None:
        nonlocal num
        num += 1

    reader._read.set_progress_handler(tick, 1)
    try:
        read()
    finally:
        reader._read.set_progress_handler(None, 1)
    return num


def test_a_chart_of_a_million_points_reads_as_many_rows_as_it_shows(store: MetricStore) -> None:
    fill(store, "long", 1_000_000)
    fill(store, "short", 1_000)
    all_points = count_work(store, lambda: store.query("short"))  # 1,000 rows, one by one
    for begin, end in ((0, 999_999), (1, 999_998), (123_456, 876_543)):
        chart = store.query("long", ["loss"], begin, end, 1000)[0]
        assert chart.num_points == end - begin + 1 == sum(chart.counts)
        assert 500 <= len(chart.steps) <= 1000
        work = count_work(store, lambda a=begin, b=end: store.query("long", ["loss"], a, b, 1000))
        assert work < 4 * all_points, (work, all_points)
    # Finer than what is stored: merges points, at most 16 for each that is shown. A merge costs more than reading.
    for end in (250_000 + 2_000, 250_000 + 15_000):
        assert 500 <= len(store.query("long", ["loss"], 250_000, end, 1000)[0].steps) <= 1000
        work = count_work(store, lambda b=end: store.query("long", ["loss"], 250_000, b, 1000))
        assert work < 150 * all_points, (work, all_points)
    assert count_work(store, lambda: store.extremes("long")) < 4 * all_points
    assert 8 * all_points < count_work(store, lambda: store.query("long", ["loss"], 0, 10_000)), (
        "it does count"
    )


def test_many_runs_cost_the_points_that_are_shown(store: MetricStore) -> None:
    for number in range(10):
        fill(store, f"long-{number}", 20_000)
        fill(store, f"short-{number}", 2_000)
    long, short = ([f"{name}-{number}" for number in range(10)] for name in ("long", "short"))
    one = count_work(store, lambda: store.query_runs(long[:1], ["loss"], max_points=100))
    ten = count_work(store, lambda: store.query_runs(long, ["loss"], max_points=100))
    assert ten < 11 * one
    assert ten < 3 * count_work(store, lambda: store.query_runs(short, ["loss"], max_points=100))
    found = store.query_runs([*long, "nobody", long[0]], ["loss"], max_points=100)
    assert list(found) == [*long, "nobody"]
    assert found["nobody"] == []
    assert found[long[3]] == store.query(long[3], ["loss"], max_points=100)
    with pytest.raises(TooMuchError, match="1000 points, at most 900"):
        store.query_runs(long, ["loss"], max_points=100, max_answer=900)


def test_appending_to_a_long_series_costs_as_much_as_to_a_short_one(
    store: MetricStore, tmp_path: Path
) -> None:
    fill(store, "r", 100_000)
    seqs = count(1_000_000)
    num = 0

    def tick() -> None:
        nonlocal num
        num += 1

    def work_of(step: int) -> int:
        nonlocal num
        num, seq = 0, next(seqs)
        store.add("r", offset=seq, last_seq=seq, points=[(seq, 1, "loss", step, 7.0, 0)]).result()
        return num

    store._connection.set_progress_handler(tick, 1)
    appended = [work_of(step) for step in range(100_000, 100_500)]
    again = [work_of(step) for step in (5, 50_000, 99_999)]
    store._connection.set_progress_handler(None, 1)
    assert sum(appended) / len(appended) < 500
    assert max(again) < 10_000, "a step that is written again rebuilds one bucket of each level"
    assert check_buckets(tmp_path / "metrics.db")
    assert store.extremes("r")["loss"][2:] == (7.0, 5)


def test_the_borders_of_buckets_stay_while_a_run_goes_on(store: MetricStore) -> None:
    fill(store, "a", 5_000)
    fill(store, "b", 5_900)
    one, other = (store.query(run, max_points=400)[0] for run in "ab")
    assert one.width == other.width == 16
    assert one.steps[1:-2] == other.steps[1 : len(one.steps) - 2]


def test_buckets_without_a_number_are_shown(store: MetricStore) -> None:
    values = [1.0 if step < 500 else NAN for step in range(1000)]
    points = [(step + 1, 1, "loss", step, value, step) for step, value in enumerate(values)]
    store.add("r", offset=1, last_seq=1000, points=points).result()
    (chart,) = store.query("r", max_points=50)
    assert sum(chart.counts) == 1000
    for step, value, low, high in zip(chart.steps, chart.values, chart.lows, chart.highs, strict=True):
        assert math.isnan(value) == (step >= 500)
        assert (
            math.isnan(low) == math.isnan(high) == (step // chart.width > 500 // chart.width or step == 999)
        )


def test_points_that_are_far_apart_have_few_buckets(store: MetricStore, tmp_path: Path) -> None:
    points = [(number + 1, 1, "val/loss", number * 5000, 1.0, 0) for number in range(3000)]
    store.add("r", offset=1, last_seq=3000, points=points).result()
    assert check_buckets(tmp_path / "metrics.db") < 3000 / 6
    (chart,) = store.query("r", max_points=500)
    assert 250 <= len(chart.steps) <= 500


def test_points_that_come_closer_together_get_finer_buckets(store: MetricStore, tmp_path: Path) -> None:
    steps = [*range(0, 100_000, 1000), *range(100_000, 200_000)]
    points = [(number, 1, "loss", step, float(step), step) for number, step in enumerate(steps, 1)]
    for begin in range(0, len(points), 5000):
        batch = points[begin : begin + 5000]
        store.add("r", offset=begin + 1, last_seq=batch[-1][0], points=batch).result()
    while store.build_more().result():
        pass
    check_buckets(tmp_path / "metrics.db")
    thousand = count_work(store, lambda: store.query("r", from_step=100_000, to_step=101_000))
    assert count_work(store, lambda: store.query("r", max_points=1000)) < 30 * thousand


def test_a_store_of_an_older_release_is_read_before_its_buckets_are_built_and_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.db"
    old = open_writer(path)
    script = Path(metric_buckets.__file__).with_name("metrics_migrations") / "0001_start.sql"
    old.executescript(f"{script.read_text()}; PRAGMA user_version = 1;")
    old.execute("INSERT INTO runs (run_id, offset, last_seq) VALUES ('r', 9, 100000)")
    old.executemany(
        "INSERT INTO series (run_key, name, attempt) VALUES (1, ?, 1)", [("few",), ("loss",), ("none",)]
    )
    old.execute("BEGIN")
    rows = [(1, step, 1.0, 0) for step in range(5)]
    rows += [(2, step, float(step), step) for step in range(100_000)]
    old.executemany("INSERT INTO points VALUES (?, ?, ?, ?)", rows)
    old.execute("COMMIT")
    old.close()
    with pytest.raises(RegistryError, match="older trn: `trn daemon start`"):
        MetricReader(path)
    store = MetricStore(path)
    try:
        assert check_buckets(path) == 0
        before = store.query("r", max_points=500)
        store.add("r", offset=10, last_seq=100_001, points=[(100_001, 2, "loss", 99_000, 0.0, 0)]).result()
        assert sum(part.num_points for part in store.discarded([Stretch("r")])) == 1000
        (taken,) = store.discarded([Stretch("r")])
        assert taken.attempt == 1
        store.add("r", offset=11, last_seq=100_002, points=[(100_002, 2, "new", 1, 0.0, 0)]).result()
        while store.build_more().result():
            pass
        assert check_buckets(path) > 100_000 / 16
        few, after = store.query("r", ["few", "loss"], max_points=500)
        assert before[0] == few
        assert after.num_points == 99_001
        assert after.width == before[1].width
        kept = slice(1, len(after.steps) - 2)
        assert (after.steps[kept], after.lows[kept]) == (before[1].steps[kept], before[1].lows[kept])
    finally:
        store.close()
