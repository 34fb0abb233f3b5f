"""Two runs are compared by what made them and what came of them: what differs is shown, and nothing else."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trn.client.comparison import RunFacts, compare, find_divergence
from trn.core.causes import QUEUED
from trn.core.runs import RunRecord, RunState
from trn.registry.metrics import Series

NAN = math.nan


def facts(
    run_id: str,
    *,
    config: dict[str, Any] | None = None,
    series: dict[str, dict[int, float]] | None = None,
    **more: Any,
) -> RunFacts:
    run = RunRecord(
        run_id=run_id,
        digest=run_id,
        state=RunState.COMPLETED,
        cause=QUEUED,
        config={"run_id": run_id, "trainer": "a:B", **(config or {})},
        submitted_ms=1,
        updated_ms=1,
    )
    known: dict[str, Any] = {"code": {}, "packages": {}, "python": "3.11", "data": {}, **more}
    points = {
        name: Series(
            name=name,
            steps=list(values),
            values=list(values.values()),
            timestamps_ms=[0] * len(values),
            num_points=len(values),
        )
        for name, values in (series or {}).items()
    }
    return RunFacts(run=run, series=points, **known)


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
    found = compare([one, other])
    assert found.config == {"hyperparams.lr": [0.1, 0.2]}
    assert found.code == {"new.py": [None, "33"], "t.py": ["11", "22"]}
    assert found.packages == {"torch": ["2.13", "2.12"]}
    assert found.data == {"rows.parquet": ["64 rows", "65 rows"]}
    assert found.unknown == {}


def test_what_the_home_does_not_know_is_named_and_differs_from_nothing() -> None:
    found = compare([facts("a", code=None), facts("b", code={"t.py": "1"}), facts("c", code={"t.py": "1"})])
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
    mine: Any, theirs: Any, expected: Any
) -> None:
    found = find_divergence(facts("a", series=mine), facts("b", series=theirs))
    assert (None if found is None else (found.metric, found.step, found.values, found.num_equal)) == expected


def test_a_comparison_is_plain_data_for_programs(tmp_path: Path) -> None:
    found = compare([facts("a", series={"loss": {1: 1.0}}), facts("b", series={"loss": {1: 2.0}})])
    (tmp_path / "it.json").write_bytes(msgspec.json.encode(found._asdict()))
    assert msgspec.json.decode((tmp_path / "it.json").read_bytes())["num_common"] == [1]
