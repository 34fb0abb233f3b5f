"""Validation, early stopping and callbacks change nothing about a run, and nothing of theirs is lost by a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_exact_resume import fingerprint, job
from worker_process import Run, write_rows


def held_out(folder: Path, num_rows: int = 21) -> dict[str, Any]:
    path = write_rows(folder / "data" / "held_out.parquet", num_rows=num_rows, seed=1)
    return {"dataset": {"parquet_paths": [str(path)], "batch_size": 8}}


def watched_job(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "trainer": "evaluating_mlp:EvaluatingMlp",
        "validate_every": 5,
        "validation": held_out(folder),
        "test": held_out(folder),
        "early_stopping": {"metric": "val/loss", "patience": 3},
        "callbacks": [
            "gen_worker.trainer.callbacks:LearningRateMonitor",
            "gen_worker.trainer.callbacks:ThroughputMonitor",
        ],
    }
    return job(folder, **{**settings, **changes})


def evaluations(run: Run) -> dict[int, dict[str, float]]:
    return {event["step"]: event["values"] for event in run.events("validation")}


def trained(run: Run) -> dict[str, Any]:
    """What training left, without what only watched it."""
    found = fingerprint(run)
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    kept = meta["loop"]["callbacks"], meta["loop"]["trainer_state"]
    return {**found, "callbacks": kept[0], "best": kept[1]["best"], "validation": evaluations(run)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    run = Run(folder / "run", **watched_job(folder))
    done = run.work()
    assert done.returncode == 0, done.stderr
    return trained(run)


def test_three_kills_and_resumes_lose_nothing_of_validation_and_early_stopping(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    run = Run(tmp_path / "run", **watched_job(tmp_path))
    assert run.work(KILL_AT_STEP="10").returncode == -9
    assert run.work(TERM_AT_STEP="13").returncode == 75  # on the epoch boundary
    assert run.work(KILL_AT_STEP="33").returncode == -9
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert trained(run) == reference
    run.check_invariants()


def test_the_same_job_without_validation_trains_the_same(tmp_path: Path, reference: dict[str, Any]) -> None:
    changes = {"validate_every": 0, "early_stopping": None, "callbacks": [], "test": None}
    run = Run(tmp_path / "run", **watched_job(tmp_path, **changes))
    assert run.work().returncode == 0
    found = fingerprint(run)
    assert {name: reference[name] for name in found} == found


def test_what_validation_returns_is_averaged_over_the_rows_and_test_comes_at_the_end(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run = Run(tmp_path / "run", **watched_job(tmp_path, max_steps=10))
    assert run.work().returncode == 0
    y = pq.read_table(tmp_path / "data" / "held_out.parquet")["y"].to_numpy()
    assert [event["rows"] for event in run.events("validation")] == [21, 21]
    for values in evaluations(run).values():
        assert values["val/y"] == pytest.approx(float(y.mean()), abs=1e-6)
        assert values["val/rows_seen"] == 1.0
    last = [event for event in run.events("metrics") if "test/loss" in event["values"]]
    assert [event["step"] for event in last] == [10]
    assert last[0]["values"]["test/loss"] == evaluations(run)[10]["val/loss"]


def test_validation_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **watched_job(tmp_path, validate_every="epoch", max_steps=30))
    assert run.work().returncode == 0
    assert list(evaluations(run)) == [13, 26]


def test_a_run_that_stopped_early_says_why_and_stays_finished(tmp_path: Path) -> None:
    stopping = {"metric": "val/rows_seen", "patience": 2}
    run = Run(tmp_path / "run", **watched_job(tmp_path, early_stopping=stopping))
    assert run.work().returncode == 0
    (completed,) = run.events("completed")
    assert completed["step"] == 15
    assert "val/rows_seen did not fall below" in completed["reason"]
    assert run.work().returncode == 0
    assert any("the run is finished at step 15 (val/rows_seen" in e["message"] for e in run.events("log"))
    run.check_invariants()


def test_a_callback_that_raises_names_itself_in_the_terminal_event(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **watched_job(tmp_path, callbacks=["evaluating_mlp:Failing"]))
    done = run.work()
    assert done.returncode == 14
    (failed,) = run.events("failed")
    assert (
        "the callback Failing.on_epoch_end raised ValueError: this callback has had enough" in failed["error"]
    )
    assert failed["step"] == 13


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer": "dropout_mlp:DropoutMlp"}, "DropoutMlp has no `validate_step"),
        ({"callbacks": ["evaluating_mlp:Nothing"]}, "has no 'Nothing'"),
        (
            {"callbacks": ["evaluating_mlp:EvaluatingMlp"]},
            "expected a subclass of gen_worker.trainer.Callback",
        ),
        ({"validation": None}, "validate_every: found 5, but there is nothing to validate on"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_the_first_step(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    run = Run(tmp_path / "run", **watched_job(tmp_path, **changes))
    done = run.work()
    assert done.returncode == 10
    assert said in done.stderr
    assert run.losses() == {}
