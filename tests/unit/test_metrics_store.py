"""Metric points: none is doubled or lost, not-a-number survives, a thinned chart still shows every extreme."""

import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trn.core.errors import NotFoundError, RegistryError, UnavailableError
from trn.registry.connection import check_integrity, open_writer
from trn.registry.metrics import MetricReader, MetricStore, Place, Point
from trn.registry.named_queries import queries
from trn.registry.sqlite import RunRegistry


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetricStore]:
    store = MetricStore(tmp_path / "metrics.db")
    yield store
    store.close()


def points(
    steps: range, *, first_seq: int = 1, attempt: int = 1, name: str = "loss", scale: float = 1.0
) -> list[Point]:
    return [
        (first_seq + number, attempt, name, step, step * scale, 1000 + step)
        for number, step in enumerate(steps)
    ]


def add(store: MetricStore, added: list[Point], offset: int = 1) -> None:
    store.add("r", offset=offset, last_seq=added[-1][0], points=added).result()


def test_points_are_queried_by_run_name_and_range_of_steps(store: MetricStore) -> None:
    add(store, points(range(1, 11)))
    add(store, points(range(5, 8), first_seq=11, name="acc", scale=0.1), offset=2)
    store.add("other", offset=9, last_seq=1, points=points(range(1, 2))).result()
    acc, loss = store.query("r")
    assert (acc.name, acc.steps, acc.num_points) == ("acc", [5, 6, 7], 3)
    assert (loss.steps, loss.values) == (list(range(1, 11)), [float(step) for step in range(1, 11)])
    assert loss.timestamps_ms == [1000 + step for step in range(1, 11)]
    (part,) = store.query("r", ["loss"], from_step=3, to_step=4)
    assert (part.steps, part.num_points, part.lows) == ([3, 4], 2, [])
    assert store.query("r", ["loss"], from_step=11) == []
    assert store.query("r", ["nothing"]) == []
    assert store.query("nobody") == []
    assert store.query("r", to_step=(1 << 64) - 1) == [acc, loss]


def test_a_batch_that_is_repeated_in_whole_or_in_part_adds_nothing_twice(store: MetricStore) -> None:
    first = points(range(1, 6))
    add(store, first, offset=100)
    assert store.place("r") == Place(100, 5)
    add(store, [(*point[:4], -1.0, point[5]) for point in first], offset=100)
    add(store, [*first, *points(range(6, 9), first_seq=6)], offset=200)
    (loss,) = store.query("r")
    assert loss.values == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert store.place("r") == Place(200, 8)


def test_the_place_commits_with_the_points_or_not_at_all(store: MetricStore) -> None:
    add(store, points(range(1, 4)), offset=10)
    broken = [*points(range(4, 6), first_seq=4), (6, 1, "loss", "no step", 1.0, 1)]
    with pytest.raises(Exception, match=r"TEXT value in INTEGER"):
        store.add("r", offset=20, last_seq=6, points=broken).result()  # type: ignore[arg-type]
    assert store.place("r") == Place(10, 3)
    (loss,) = store.query("r")
    assert loss.steps == [1, 2, 3]


def test_a_later_attempt_replaces_what_earlier_ones_left_after_its_resume(store: MetricStore) -> None:
    add(store, [*points(range(1, 101)), *points(range(50, 101, 50), first_seq=101, name="val")])
    add(store, points(range(61, 70, 2), first_seq=200, attempt=2, scale=10.0))
    val = store.query("r", ["val"])[0]
    assert val.steps == [50, 100]  # no point of its own yet
    (loss,) = store.query("r", ["loss"])
    assert loss.steps == [*range(1, 61), 61, 63, 65, 67, 69]
    assert loss.values[59:] == [60.0, 610.0, 630.0, 650.0, 670.0, 690.0]
    both = [
        *points(range(70, 72), first_seq=300, attempt=2),
        *points(range(65, 67), first_seq=302, attempt=3),
    ]
    add(store, both)
    (loss,) = store.query("r", ["loss"])
    assert loss.steps[-4:] == [61, 63, 65, 66]


def test_a_step_that_is_reported_again_has_its_newest_value(store: MetricStore) -> None:
    add(store, points(range(1, 4)))
    add(store, points(range(2, 3), first_seq=4, scale=50.0))
    assert store.query("r")[0].values == [1.0, 100.0, 3.0]


def test_what_is_no_number_survives(store: MetricStore) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]
    add(store, [(seq, 1, "x", seq, value, 0) for seq, value in enumerate(values, 1)])
    (series,) = store.query("r")
    assert math.isnan(series.values[1])
    assert [value for value in series.values if value == value] == [
        value for value in values if value == value
    ]


def test_a_thinned_chart_shows_the_one_point_that_is_no_number(store: MetricStore) -> None:
    added = points(range(1, 1001))
    for seq, bad in ((400, math.nan), (700, math.inf)):
        added[seq - 1] = (*added[seq - 1][:4], bad, 0)
    add(store, added)
    (thin,) = store.query("r", max_points=20)
    assert [thin.steps[at] for at, value in enumerate(thin.values) if math.isnan(value)] == [400]
    assert math.inf in thin.highs


numbers = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=60, deadline=None)
@given(
    series=st.dictionaries(st.integers(0, 1 << 40), numbers, min_size=1, max_size=60),
    max_points=st.integers(1, 70),
)
def test_thinning_keeps_the_first_the_last_and_every_extreme(
    tmp_path_factory: pytest.TempPathFactory, series: dict[int, float], max_points: int
) -> None:
    store = MetricStore(tmp_path_factory.mktemp("metrics") / "metrics.db")
    try:
        steps = sorted(series)
        added = [(seq, 1, "x", step, series[step], seq) for seq, step in enumerate(steps, 1)]
        add(store, added)
        (thin,) = store.query("r", max_points=max_points)
    finally:
        store.close()
    assert thin.num_points == len(steps)
    assert len(thin.steps) <= max(max_points, 3)
    assert (thin.steps[0], thin.steps[-1]) == (steps[0], steps[-1])
    assert thin.steps == sorted(set(thin.steps))
    for step, value in zip(thin.steps, thin.values, strict=True):
        assert value == series[step] or (math.isnan(value) and math.isnan(series[step]))
    if not thin.lows:
        assert thin.steps == steps
        return
    clean = [value for value in series.values() if not math.isnan(value)]
    if clean:
        assert min(low for low in thin.lows if not math.isnan(low)) == min(clean)
        assert max(high for high in thin.highs if not math.isnan(high)) == max(clean)
    assert any(map(math.isnan, series.values())) == any(map(math.isnan, thin.values))


def test_another_process_reads_while_the_store_writes(store: MetricStore, tmp_path: Path) -> None:
    reader = MetricReader(tmp_path / "metrics.db")
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            for series in reader.query("r", max_points=10):
                seen.append(series.num_points)

    thread = threading.Thread(target=read)
    thread.start()
    for batch in range(20):
        add(store, points(range(batch * 100, batch * 100 + 100), first_seq=batch * 100 + 1), offset=batch + 1)
    stop.set()
    thread.join()
    assert seen == sorted(seen)
    assert all(count % 100 == 0 for count in seen)  # whole batches or nothing of them
    assert reader.query("r")[0].num_points == 2000
    reader.close()


def test_without_a_file_the_reader_says_so_and_a_closed_store_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no run has reported any"):
        MetricReader(tmp_path / "metrics.db")
    store = MetricStore(tmp_path / "metrics.db")
    store.close()
    with pytest.raises(UnavailableError):
        store.add("r", offset=1, last_seq=1, points=[])
    assert check_integrity(tmp_path / "metrics.db") == []


def test_points_of_a_newer_release_are_refused(tmp_path: Path) -> None:
    connection = open_writer(tmp_path / "metrics.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RegistryError, match="newer trn"):
        MetricStore(tmp_path / "metrics.db")


def test_the_log_is_brought_back_into_the_file(store: MetricStore) -> None:
    add(store, points(range(1, 500)))
    assert store.checkpoint_wal() == (0, 0, 0)


def test_every_query_is_one_that_sqlite_understands(store: MetricStore, tmp_path: Path) -> None:
    RunRegistry(tmp_path / "registry.db").close()
    store.writer.between(
        lambda: store._connection.execute(f"ATTACH DATABASE '{tmp_path / 'registry.db'}' AS registry")
    ).result()
    for name, statement in queries("metrics_queries.sql").items():
        names = set(re.findall(r":(\w+)", statement))
        values: dict[str, str] | list[str] = (
            dict.fromkeys(names, "") if names else [""] * statement.count("?")
        )
        store.writer.write(
            lambda connection, s=statement, v=values: connection.execute(f"EXPLAIN {s}", v).fetchall()
        )
        assert statement, name
