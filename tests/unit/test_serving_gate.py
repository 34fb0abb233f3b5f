"""What the gate of a model server lets pass: a metric, a bound on latency, the columns, memory, errors on feedback."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gen_worker.contract.checkpoints.choice import CheckpointInfo, make_info
from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry, Metric
from gen_worker.contract.job.spec import GateSpec
from gen_worker.inference.gate import (
    RefusedError,
    recorded_metric,
    require_columns,
    require_errors,
    require_latency,
    require_metric,
)
from gen_worker.inference.memory import estimate_need, read_available
from gen_worker.inference.messages import ColumnType, Ready

X, Y = ColumnType(name="x", dtype="float32", dims=(4,)), ColumnType(name="y", dtype="float32")


def checkpoint(
    metrics: dict[str, Any] | None = None, metric: Metric | None = None, size: int = 8
) -> CheckpointInfo:
    meta = CheckpointMeta(
        run_id="run-1",
        attempt=1,
        step=5,
        epoch=0,
        final=False,
        metric=metric,
        loop=msgspec.Raw(msgspec.json.encode({"trainer_state": {"metrics": metrics or {}}})),
        files=(FileEntry(name="step-00000005.pt", size_bytes=size, hash="sha256:0"),),
    )
    return make_info(Path("step-00000005.meta.json"), meta)


def ready(
    inputs: tuple[ColumnType, ...] = (X,), outputs: tuple[ColumnType, ...] = (Y,), **fields: Any
) -> Ready:
    return Ready(pid=1, inputs=inputs, outputs=outputs, **fields)


def test_a_metric_is_the_one_by_which_checkpoints_are_kept_or_any_other_that_was_measured() -> None:
    kept = Metric(name="val/loss", value=0.5, mode="min")
    info = checkpoint({"val/loss": 9.0, "val/f1": 0.7, "bad": math.inf, "odd": "nan", "flag": True}, kept)
    assert recorded_metric(info, "val/loss") == 0.5
    assert recorded_metric(info, "val/f1") == 0.7
    assert [recorded_metric(info, name) for name in ("bad", "odd", "flag", "none")] == [None] * 4


def test_a_metric_that_the_checkpoint_does_not_have_is_refused_with_those_that_it_has() -> None:
    info = checkpoint({"val/loss": 9.0, "train/loss": 0.7, "odd": "nan"})
    with pytest.raises(RefusedError, match=r"no finite val/los, .* it has train/loss, val/loss$"):
        require_metric(GateSpec(metric="val/los"), info, info, {})
    with pytest.raises(RefusedError, match=r"it has no metric$"):
        require_metric(GateSpec(metric="val/los"), checkpoint(), None, {})


@pytest.mark.parametrize(
    ("gate", "value", "live", "passes"),
    [
        ({"mode": "min"}, 0.5, 0.5, True),
        ({"mode": "min"}, 0.51, 0.5, False),
        ({"mode": "min", "tolerance": 0.1}, 0.59, 0.5, True),
        ({"mode": "min", "tolerance": 0.1}, 0.61, 0.5, False),
        ({"mode": "max"}, 0.5, 0.6, False),
        ({"mode": "max", "tolerance": 0.2}, 0.5, 0.6, True),
        ({"mode": "max"}, 0.7, 0.6, True),
        ({"mode": "min"}, None, 0.5, False),
        ({"mode": "min"}, 0.5, None, True),
    ],
)
def test_a_metric_may_be_worse_by_the_tolerance_and_no_more(
    gate: dict[str, Any], value: float | None, live: float | None, passes: bool
) -> None:
    figures: dict[str, Any] = {}
    new, old = (checkpoint({} if each is None else {"val/m": each}) for each in (value, live))
    spec = GateSpec(metric="val/m", **gate)
    if passes:
        require_metric(spec, new, old, figures)
    else:
        with pytest.raises(RefusedError, match="val/m") as caught:
            require_metric(spec, new, old, figures)
        assert caught.value.cause == "metric"
    assert (figures["metric"]["value"], figures["metric"]["live"]) == (value, live)


def test_without_a_metric_nothing_is_compared_and_a_live_checkpoint_that_is_gone_stops_nothing() -> None:
    figures: dict[str, Any] = {}
    require_metric(GateSpec(), checkpoint(), None, figures)
    assert figures == {}
    require_metric(GateSpec(metric="val/m"), checkpoint({"val/m": 1.0}), None, figures)


def test_latency_is_that_of_the_largest_shape() -> None:
    figures: dict[str, Any] = {}
    model = ready(probe_ms={1: 9.0, 32: 4.0})
    require_latency(GateSpec(max_latency_ms=4.0), model, figures)
    assert figures == {"probe_ms": 4.0, "max_latency_ms": 4.0}
    with pytest.raises(RefusedError, match="32 probe rows took 4 ms"):
        require_latency(GateSpec(max_latency_ms=3.9), model, {})
    with pytest.raises(RefusedError, match="not known"):
        require_latency(GateSpec(max_latency_ms=3.9), ready(), {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"outputs": (Y, ColumnType(name="extra", dtype="int64"))}, ""),
        ({"inputs": ()}, ""),
        ({"inputs": (ColumnType(name="x", dtype="any"),)}, ""),
        ({"inputs": (ColumnType(name="x", dtype="float32", dims=(None,)),)}, ""),
        (
            {"inputs": (X, ColumnType(name="z", dtype="int64"))},
            r"it needs a column z \(int64\), the served version does not",
        ),
        (
            {"inputs": (ColumnType(name="x", dtype="float32", dims=(5,)),)},
            r"it needs a column x \(float32\[5\]\), the served version takes float32",
        ),
        ({"outputs": ()}, "its answers lack y, which is float32 in those of the served version"),
        (
            {"outputs": (ColumnType(name="y", dtype="float64"),)},
            "its answers have float64 as y, which is float32 in those of the served version",
        ),
    ],
)
def test_a_version_takes_what_the_live_one_takes_and_gives_what_it_gives(
    changes: dict[str, Any], says: str
) -> None:
    if not says:
        require_columns(ready(**changes), ready())
        return
    with pytest.raises(RefusedError, match=says) as caught:
        require_columns(ready(**changes), ready())
    assert caught.value.cause == "columns"


def test_an_error_on_feedback_may_be_equal_and_not_larger() -> None:
    require_errors("mse", 1.0, 1.0, 40, {})
    require_errors("mse", 1.0, math.inf, 40, {})
    for value in (1.1, math.inf, math.nan):
        with pytest.raises(RefusedError, match="newest 40 rows"):
            require_errors("mse", value, 1.0, 40, {})


def test_memory_is_what_the_machine_and_every_control_group_leave(tmp_path: Path) -> None:
    memory, own, groups = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    memory.write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    assert read_available(memory, own, groups) == 3000 << 10
    folder = groups / "job" / "worker"
    folder.mkdir(parents=True)
    own.write_text("0::/job/worker\n")
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("100\n")
    assert read_available(memory, own, groups) == 3000 << 10
    (folder.parent / "memory.max").write_text("2000000\n")
    (folder.parent / "memory.current").write_text("1500000\n")
    (folder.parent / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert read_available(memory, own, groups) == 700_000
    own.write_text("4:memory,hugetlb:/old\n")
    old = groups / "memory" / "old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("1000\n")
    (old / "memory.usage_in_bytes").write_text("5000\n")
    assert read_available(memory, own, groups) == 0
    assert read_available(tmp_path / "none", tmp_path / "none", groups) is None


def test_a_model_needs_its_weights_twice_while_it_is_loaded() -> None:
    assert estimate_need(checkpoint(size=1 << 30)) - estimate_need(checkpoint(size=0)) == 2 << 30
