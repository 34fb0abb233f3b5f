"""Two runs are compared by what made them and what came of them: what differs is shown, and nothing else."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trn.client.comparison import RunFacts, compare
from trn.core.causes import QUEUED
from trn.core.runs import RunRecord, RunState
from trn.registry.metrics import Agreement, MetricStore, Point

NAN = math.nan


def facts(run_id: str, *, config: dict[str, Any] | None = None, **more: Any) -> RunFacts:
    run = RunRecord(
        run_id=run_id,
        digest=run_id,
        state=RunState.COMPLETED,
        cause=QUEUED,
        config={"run_id": run_id, "trainer": "a:B", **(config or {})},
        submitted_ms=1,
        updated_ms=1,
    )
    known: dict[str, Any] = {"code": {}, "packages": {}, "python": "3.11", "data": {}, "newest": {}, **more}
    return RunFacts(run=run, **known)


def agree(folder: Path, *runs: dict[str, dict[int, float]]) -> Agreement:
    """Of two runs with these points: metric -> step -> value."""
    store = MetricStore(folder / "metrics.db")
    try:
        for run_id, curves in zip("ab", runs, strict=True):
            points: list[Point] = [
                (seq, 1, name, step, value, 0)
                for seq, (name, step, value) in enumerate(
                    ((name, step, value) for name, curve in curves.items() for step, value in curve.items()),
                    1,
                )
            ]
            store.add(run_id, offset=1, last_seq=len(points), points=points).result()
        return store.compare("a", "b")
    finally:
        store.close()


def test_only_what_differs_is_in_a_comparison() -> None:
    one = facts(
        "a",
        config={"seed": 1, "hyperparams": {"lr": 0.1, "depth": 2}},
        code={"t.py": "11", "same.py": "00"},
        packages={"torch": "2.13", "numpy": "2"},
        data={"rows.parquet": "64 rows"},
    )
    other = facts(
        "b",
        config={"seed": 1, "hyperparams": {"lr": 0.2, "depth": 2}},
        code={"t.py": "22", "same.py": "00", "new.py": "33"},
        packages={"torch": "2.12", "numpy": "2"},
        data={"rows.parquet": "65 rows"},
    )
    found = compare([one, other], [Agreement()])
    assert found.config == {"hyperparams.lr": [0.1, 0.2]}
    assert found.code == {"new.py": [None, "33"], "t.py": ["11", "22"]}
    assert found.packages == {"torch": ["2.13", "2.12"]}
    assert found.data == {"rows.parquet": ["64 rows", "65 rows"]}
    assert found.unknown == {}


def test_what_the_home_does_not_know_is_named_and_differs_from_nothing() -> None:
    runs = [facts("a", code=None), facts("b", code={"t.py": "1"}), facts("c", code={"t.py": "1"})]
    found = compare(runs, [Agreement(), Agreement()])
    assert found.code == {}
    assert found.unknown == {"code": ["a"]}


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"train/loss": {1: 1.0, 2: 0.5}}, {"train/loss": {1: 1.0, 2: 0.5}}, None),
        (
            {"train/loss": {1: 1.0, 2: 0.5, 3: 0.3}},
            {"train/loss": {1: 1.0, 2: 0.4, 3: 0.3}},
            ("train/loss", 2, (0.5, 0.4), 1),
        ),
        # Steps that only one of them reported tell nothing, and NaN is equal to NaN.
        ({"train/loss": {1: NAN, 3: 2.0}}, {"train/loss": {1: NAN, 2: 7.0, 3: 2.0}}, None),
        # The earliest of all metrics counts.
        (
            {"train/loss": {1: 1.0, 4: 1.0}, "val/loss": {2: 1.0}},
            {"train/loss": {1: 1.0, 4: 2.0}, "val/loss": {2: 3.0}},
            ("val/loss", 2, (1.0, 3.0), 0),
        ),
        # The clock makes no difference.
        ({"throughput/samples_per_s": {1: 1.0}}, {"throughput/samples_per_s": {1: 2.0}}, None),
    ],
)
def test_runs_diverge_at_the_first_step_at_which_a_metric_differs(
    mine: Any, theirs: Any, expected: Any, tmp_path: Path
) -> None:
    found = agree(tmp_path, mine, theirs)
    assert ((found.metric, found.step, found.values, found.num_equal) if found.metric else None) == expected


@pytest.mark.parametrize(
    ("mine", "theirs", "num_common"),
    [
        ({"loss": {1: 1.0, 2: 2.0, 4: 1.0}}, {"loss": {2: 5.0, 3: 1.0, 4: 1.0}}, 2),
        # A step counts once, whichever metrics have it.
        ({"a": {1: 1.0, 2: 1.0}, "b": {2: 1.0, 3: 1.0}}, {"a": {1: 1.0, 2: 1.0}, "b": {2: 1.0, 3: 1.0}}, 3),
        ({"a": {1: 1.0}}, {"b": {1: 1.0}}, 0),
        ({"time/step_ms": {1: 1.0}}, {"time/step_ms": {1: 1.0}}, 0),
        ({"a": {1: 1.0}}, {}, 0),
    ],
)
def test_steps_that_both_runs_have_are_counted(
    mine: Any, theirs: Any, num_common: int, tmp_path: Path
) -> None:
    assert agree(tmp_path, mine, theirs).num_common == num_common


def test_infinities_and_nan_are_values_like_others(tmp_path: Path) -> None:
    inf = math.inf
    found = agree(tmp_path, {"a": {1: inf, 2: NAN, 3: -inf}}, {"a": {1: inf, 2: NAN, 3: NAN}})
    assert (found.step, found.num_equal, found.values[0]) == (3, 2, -inf)
    assert math.isnan(found.values[1])


def test_a_comparison_names_where_each_run_parts_from_the_first_and_the_last_values(tmp_path: Path) -> None:
    runs = [
        facts("a", newest={"loss": 1.0}),
        facts("b", newest={"loss": 2.0}),
        facts("c", newest={"acc": 3.0}),
    ]
    parted = Agreement(num_common=4, metric="loss", step=3, values=(1.0, 2.0), num_equal=2)
    found = compare(runs, [parted, Agreement(num_common=1)])
    assert found.divergences == [(("a", "b"), "loss", 3, (1.0, 2.0), 2)]
    assert found.num_common == [4, 1]
    assert found.metrics == {"acc": [None, None, 3.0], "loss": [1.0, 2.0, None]}
    (tmp_path / "it.json").write_bytes(msgspec.json.encode(found._asdict()))
    assert msgspec.json.decode((tmp_path / "it.json").read_bytes())["num_common"] == [4, 1]
