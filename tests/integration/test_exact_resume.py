"""A run that is stopped, killed and damaged in any way ends bit for bit as the run that was never stopped."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from worker_process import Run, write_rows

# 100 rows in batches of 8: 13 steps an epoch, the last one shorter.
JOB: dict[str, Any] = {
    "trainer": "dropout_mlp:DropoutMlp",
    "max_steps": 45,
    "metric_every": 1,
    "checkpoint_every": 6,
    "seed": 7,
}


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    data = write_rows(folder / "data" / "rows.parquet")
    return {**JOB, "dataset": {"parquet_paths": [str(data)], "batch_size": 8, "shuffle": True}, **changes}


def fingerprint(run: Run) -> dict[str, Any]:
    """Everything the end of a run depends on."""
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    (data,) = (path for path in run.checkpoints.glob("final.*") if path.suffix in (".pt", ".safetensors"))
    return {
        "weights": hashlib.sha256(data.read_bytes()).hexdigest(),
        "state": meta["state"],
        "rng": meta["rng"],
        "cursor": meta["cursor"],
        "losses": run.losses(),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("reference")
    run = Run(folder / "run", **job(folder))
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert sorted(run.losses()) == list(range(1, 46))
    return fingerprint(run)


def test_two_runs_with_the_same_seed_are_the_same(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path / "run", **job(tmp_path))
    assert run.work().returncode == 0
    assert fingerprint(run) == reference


def test_three_resumes_in_a_row_change_nothing(tmp_path: Path, reference: dict[str, Any]) -> None:
    """One plain kill, one stop exactly on the epoch boundary, one kill in the middle of a save, one truncated file."""
    run = Run(tmp_path / "run", **job(tmp_path))
    assert run.work(KILL_AT_STEP="10").returncode == -9
    stopped = run.work(TERM_AT_STEP="13")
    assert stopped.returncode == 75, stopped.stderr
    saved = json.loads((run.checkpoints / "step-00000013.meta.json").read_text())
    assert (saved["cursor"]["epoch"], saved["cursor"]["batch"]) == (1, 0)
    during_save = run.work(
        GEN_WORKER_FAILPOINTS="checkpoint.data_synced=kill@2", KILL_AT_STEP="25"
    )  # the save of step 24 dies half way; the worker dies with it or fails because of it
    assert during_save.returncode in (-9, 14), during_save.stderr
    assert run.work(KILL_AT_STEP="34").returncode == -9
    run.wait_for_writer()
    newest = max(run.checkpoints.glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    last = run.work()
    assert last.returncode == 0, last.stderr
    passed_over = [event["message"] for event in run.events("log") if "passed over" in event["message"]]
    assert any(newest.name in message or newest.stem in message for message in passed_over), passed_over
    assert fingerprint(run) == reference
    run.check_invariants()


def test_a_run_without_shuffling_in_safetensors_resumes_to_the_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"checkpoints": {"format": "safetensors"}, "max_steps": 20}
    straight = Run(tmp_path / "straight", **job(tmp_path, **changes))
    broken = Run(tmp_path / "broken", **job(tmp_path, **changes))
    for run in (straight, broken):
        run.job["dataset"] = {**run.job["dataset"], "shuffle": False}
    assert straight.work().returncode == 0
    assert broken.work(KILL_AT_STEP="14").returncode == -9
    assert broken.work().returncode == 0
    assert fingerprint(broken) == fingerprint(straight)


def test_a_finished_run_does_nothing_and_goes_on_when_asked_for_more(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    run = Run(tmp_path / "run", **job(tmp_path, max_steps=30))
    assert run.work().returncode == 0
    before = {
        path.name: path.stat().st_mtime_ns for path in run.checkpoints.iterdir() if path.name != ".lease"
    }
    again = run.work()
    assert again.returncode == 0
    assert "finished at step 30" in again.stderr
    assert {p.name: p.stat().st_mtime_ns for p in run.checkpoints.iterdir() if p.name != ".lease"} == before
    run.job["max_steps"] = 45
    assert run.work().returncode == 0
    assert fingerprint(run) == reference
    run.check_invariants()


def test_epochs_end_where_steps_would(tmp_path: Path) -> None:
    by_epochs = Run(tmp_path / "epochs", **job(tmp_path, max_steps=None, epochs=2))
    by_epochs.job.pop("max_steps")
    assert by_epochs.work(TERM_AT_STEP="13").returncode == 75
    assert by_epochs.work().returncode == 0
    by_steps = Run(tmp_path / "steps", **job(tmp_path, max_steps=26))
    assert by_steps.work().returncode == 0
    assert fingerprint(by_epochs) == fingerprint(by_steps)


def test_data_that_changed_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **job(tmp_path))
    assert run.work(KILL_AT_STEP="10").returncode == -9
    run.wait_for_writer()
    before = sorted(path.name for path in run.checkpoints.iterdir())
    write_rows(tmp_path / "data" / "rows.parquet", seed=1)
    refused = run.work()
    assert refused.returncode == 11
    assert "rows.parquet" in refused.stderr
    assert run.events()[-1]["category"] == "input"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == before


def test_an_isolated_trainer_gives_the_same_bits(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path / "run", **job(tmp_path))
    assert run.work(TRAINER_ISOLATED="1", TERM_AT_STEP="20").returncode == 75
    done = run.work(TRAINER_ISOLATED="1")
    assert done.returncode == 0, done.stderr
    assert fingerprint(run) == reference
    left = sorted(path.name for path in run.events_path.parent.iterdir())
    assert left == ["events.jsonl"]


def test_the_decode_cache_gives_the_same_bits(tmp_path: Path, reference: dict[str, Any]) -> None:
    run = Run(tmp_path / "run", **job(tmp_path))
    run.job["dataset"] = {**run.job["dataset"], "decode_cache": True}
    assert run.work(TERM_AT_STEP="20", TRN_CACHE_DIR=str(tmp_path / "cache")).returncode == 75
    assert run.work(TRN_CACHE_DIR=str(tmp_path / "cache")).returncode == 0
    assert fingerprint(run) == reference
