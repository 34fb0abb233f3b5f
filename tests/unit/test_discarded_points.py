"""Points that a later attempt took back are kept, within a bound, and say whether the resume was exact."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trn.core.errors import TooMuchError
from trn.registry import discarded_points
from trn.registry.discarded_points import Drift, RepeatedSteps
from trn.registry.metrics import MetricStore, Stretch

NAN, INF = math.nan, math.inf


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MetricStore]:
    store = MetricStore(tmp_path / "metrics.db")
    yield store
    store.close()


class Run:
    """A run whose attempts report values of steps."""

    def __init__(self, store: MetricStore, run_id: str = "r") -> None:
        self._store = store
        self._run_id = run_id
        self._seq = 0

    def report(self, attempt: int, steps: Sequence[int], *, name: str = "loss", bias: float = 0.0) -> None:
        points = [
            (number, attempt, name, step, step + bias, 100 * attempt + step)
            for number, step in enumerate(steps, self._seq + 1)
        ]
        self._seq += len(points)
        self._store.add(self._run_id, offset=self._seq, last_seq=self._seq, points=points).result()


def test_what_each_attempt_reported_is_kept_with_its_attempt(store: MetricStore) -> None:
    run = Run(store)
    run.report(1, range(1, 11))
    run.report(2, range(6, 9), bias=0.5)
    run.report(3, range(4, 6))
    assert store.query("r")[0].steps == [1, 2, 3, 4, 5]
    first, second = store.discarded([Stretch("r")])
    assert (first.run_id, first.name, first.attempt) == ("r", "loss", 1)
    assert first.steps == [4, 5, 6, 7, 8, 9, 10]
    assert first.timestamps_ms[0] == 104
    assert (second.attempt, second.steps, second.values) == (2, [6, 7, 8], [6.5, 7.5, 8.5])
    assert (second.num_points, second.num_dropped) == (3, 0)
    (part,) = store.discarded([Stretch("r", 8, 9)], ["loss"], max_points=5)[:1]
    assert part.steps == [8, 9]
    assert store.discarded([Stretch("r")], ["other"]) == store.discarded([Stretch("nobody")]) == []


def test_discarded_points_are_thinned_out_and_show_what_is_not_a_number(store: MetricStore) -> None:
    run = Run(store)
    run.report(1, range(100))
    run.report(1, [37], bias=NAN)
    run.report(2, [0])
    (thin,) = store.discarded([Stretch("r")], max_points=20)
    assert len(thin.steps) <= 20
    assert thin.num_points == 100
    assert [step for step, value in zip(thin.steps, thin.values, strict=True) if math.isnan(value)] == [37]
    with pytest.raises(TooMuchError, match="100 points, at most 50"):
        store.discarded([Stretch("r")], max_answer=50)


def test_discarded_points_are_removed_with_the_run(store: MetricStore) -> None:
    for run_id in ("r", "other"):
        run = Run(store, run_id)
        run.report(1, range(10))
        run.report(2, range(5, 10))
    store.remove(["r"]).result()
    assert store.discarded([Stretch("r")]) == []
    assert store.discarded([Stretch("other")])[0].steps == [5, 6, 7, 8, 9]
    count = store._read.execute("SELECT count(*) FROM discarded").fetchone()[0]
    assert count == 5


def test_a_run_that_was_never_taken_back_has_no_repeated_steps(store: MetricStore) -> None:
    Run(store).report(1, range(10))
    Run(store, "resumed").report(2, range(10))
    for run_id in ("r", "resumed", "nobody"):
        assert store.repeated_steps(run_id) == RepeatedSteps()
        assert store.repeated_steps(run_id).exactness == ""


def test_equal_values_are_an_exact_resume(store: MetricStore) -> None:
    run = Run(store)
    run.report(1, range(1, 11))
    run.report(1, range(1, 11), name="throughput/rows_per_s")
    run.report(1, [3, 6, 9], name="val", bias=NAN)
    run.report(2, range(6, 9))
    run.report(2, range(6, 9), name="throughput/rows_per_s", bias=17.0)
    found = store.repeated_steps("r")
    assert (found.num_steps, found.drift, found.exactness) == (3, None, "exact")
    run.report(2, [9, 10])
    run.report(2, [6], name="val", bias=NAN)
    assert store.repeated_steps("r").num_steps == 5
    run.report(3, range(1, 3))
    found = store.repeated_steps("r")
    assert (found.num_steps, found.exactness) == (7, "exact"), "also of what was taken back twice"


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.25), (0.0, NAN), (NAN, 0.0), (INF, -INF)])
def test_the_first_step_with_two_values_is_the_drift(store: MetricStore, before: float, after: float) -> None:
    run = Run(store)
    run.report(1, range(1, 8))
    run.report(1, [7, 8, 9], bias=before)
    run.report(1, range(1, 11), name="acc")
    run.report(2, range(5, 7))
    run.report(2, [7, 8], bias=after)
    run.report(2, [8], name="acc", bias=1.0)
    found = store.repeated_steps("r")
    assert (found.num_steps, found.exactness) == (4, "drifted")
    drift = found.drift
    assert drift is not None
    assert (drift.step, drift.name) == (7, "loss")
    assert str((drift.before, drift.after)) == str((7 + before, 7 + after))


def test_a_drift_between_two_attempts_is_found_where_a_third_took_back_both(store: MetricStore) -> None:
    run = Run(store)
    run.report(1, range(10))
    run.report(2, range(5, 10), bias=0.5)
    run.report(3, range(2, 4))
    found = store.repeated_steps("r")
    assert found.drift == Drift(step=5, name="loss", before=5.0, after=5.5)


def test_a_bound_holds_the_oldest_go_first_and_the_first_drift_stays(
    store: MetricStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discarded_points, "MAX_DISCARDED", 20)
    run = Run(store)
    run.report(1, range(100))
    run.report(2, range(50, 100), bias=0.5)
    (first,) = store.discarded([Stretch("r")])
    assert (first.steps, first.num_dropped) == (list(range(50, 70)), 30), "those that are trained again first"
    for attempt in range(3, 9):
        run.report(attempt, range(50, 100), bias=0.5)
    found = store.discarded([Stretch("r")])
    assert sum(part.num_points for part in found) == 20
    assert found[0].num_dropped == 50 * 7 - 20
    result = store.repeated_steps("r")
    assert result.drift == Drift(step=50, name="loss", before=50.0, after=50.5)
    assert result.num_dropped == 330


def test_a_drift_beyond_the_bound_of_what_is_taken_back_next_is_not_forgotten(
    store: MetricStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discarded_points, "MAX_DISCARDED", 20)
    run = Run(store)
    run.report(1, range(110))
    run.report(2, [*range(100, 105)])
    run.report(2, range(105, 110), bias=0.5)
    expected = Drift(step=105, name="loss", before=105.0, after=105.5)
    assert store.repeated_steps("r").drift == expected
    run.report(3, range(10))
    assert store.repeated_steps("r").drift == expected
    assert sum(part.num_points for part in store.discarded([Stretch("r")])) == 20
