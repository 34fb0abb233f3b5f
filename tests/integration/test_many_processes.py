"""One run in several processes over gloo: it stops together, fails in the right words, and resumes to the bit."""

import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_process import Run, write_rows

from gen_worker.contract.process_identity import is_process_alive

# 97 rows in batches of 8: 13 steps an epoch, and one row is left for the last: most ranks get none of it.
NUM_ROWS = 97
JOB: dict[str, Any] = {
    "trainer": "parallel_mlp:ParallelMlp",
    "max_steps": 40,
    "metric_every": 1,
    "checkpoint_every": 6,
    "validate_every": 10,
    "seed": 7,
    "hyperparams": {"dropout": 0.3},
}


def parallel_run(folder: Path, processes: int, **changes: Any) -> Run:
    rows = write_rows(folder / "data" / "rows.parquet", num_rows=NUM_ROWS)
    held_out = write_rows(folder / "data" / "held_out.parquet", num_rows=21, seed=1)
    data: dict[str, Any] = {
        "dataset": {"parquet_paths": [str(rows)], "batch_size": 8, "shuffle": True},
        "validation": {"dataset": {"parquet_paths": [str(held_out)], "batch_size": 8}},
        "resources": {"processes": processes},
    }
    data["dataset"] |= changes.pop("dataset", {})
    return Run(folder / "run", **{**JOB, **data, **changes})


def values(run: Run, name: str) -> dict[int, float]:
    found = {}
    for event in run.events("metrics", "validation"):
        if name in event["values"]:
            found[event["step"]] = event["values"][name]
    return found


def fingerprint(run: Run) -> dict[str, Any]:
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    return {
        "weights": hashlib.sha256((run.checkpoints / "final.pt").read_bytes()).hexdigest(),
        "state": meta["state"],
        "rng": meta["rng"],
        "cursor": meta["cursor"],
        "losses": run.losses(),
        "validation": values(run, "val/loss"),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = parallel_run(tmp_path_factory.mktemp("reference"), 2)
    done = run.work()
    assert done.returncode == 0, done.stderr
    run.check_invariants()
    assert sorted(run.losses()) == list(range(1, 41))
    assert [event for event in run.events("log") if event["level"] == "warning"] == []
    assert sorted(path.name for path in run.events_path.parent.iterdir()) == ["events.jsonl"]
    return fingerprint(run)


def test_stops_kills_and_resumes_of_two_processes_change_nothing(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    run = parallel_run(tmp_path, 2)
    stopped = run.work(
        FAULT="term", FAULT_AT_STEP="12"
    )  # one rank is asked; both stop at one step and save it
    assert stopped.returncode == 75, stopped.stderr
    (ended,) = run.events("failed")
    assert ended["category"] == "cancelled"
    assert ended["step"] >= 12
    assert (run.checkpoints / f"step-{ended['step']:08d}.meta.json").exists()
    killed = run.work(FAULT="kill", FAULT_AT_STEP="27")
    assert killed.returncode == 14, killed.stderr
    assert run.events("failed")[-1]["error"].startswith("process 1 of 2 was killed by SIGKILL")
    assert "process 1 of 2 was killed by SIGKILL" in killed.stderr
    done = run.work()
    assert done.returncode == 0, done.stderr
    run.check_invariants()
    assert fingerprint(run) == reference


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def test_a_stop_that_comes_before_the_processes_are_there_is_kept_for_them(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2, max_steps=1_000_000)
    worker = run.start()
    wait_until(lambda: list(run.events_path.parent.glob("processes-*")), "the launcher")
    worker.send_signal(signal.SIGTERM)
    _, stderr = worker.communicate(timeout=200)
    assert worker.returncode == 75, stderr
    (ended,) = run.events("failed")
    assert (ended["category"], ended["error"].splitlines()[0]) == ("cancelled", "cancelled by SIGTERM")
    run.check_invariants()


def test_a_launcher_that_is_killed_leaves_no_process_and_no_attempt_without_its_end(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2, max_steps=1_000_000, checkpoint_every=0)
    worker = run.start()
    wait_until(lambda: len(run.events("metrics")) > 5, "some steps")
    (agent,) = (
        int(pid) for pid in Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    )
    ranks = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    os.kill(agent, signal.SIGKILL)
    _, stderr = worker.communicate(timeout=200)
    assert worker.returncode != 0
    assert len(run.events("failed")) == 1, stderr
    assert [pid for pid in ranks if is_process_alive(pid, None)] == []
    run.check_invariants()


def test_processes_that_never_exchange_gradients_are_told_so(tmp_path: Path) -> None:
    apart = {
        "trainer": "evaluating_mlp:EvaluatingMlp",
        "max_steps": 6,
        "hyperparams": {},  # this class reads none
    }
    run = parallel_run(tmp_path, 2, **apart)
    done = run.work()
    assert done.returncode == 0, done.stderr
    (warning,) = (event["message"] for event in run.events("log") if event["level"] == "warning")
    assert warning.startswith("the processes have different values in model.0.weight, model.0.bias")
    assert "distribute_module" in warning


def test_a_loss_that_becomes_nan_over_an_empty_share_is_foretold_and_told(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2, trainer="parallel_mlp:MeanLoss", max_steps=14, checkpoint_every=0)
    done = run.work()
    assert done.returncode == 0, done.stderr
    warnings = [event for event in run.events("log") if event["level"] == "warning"]
    foretold, told = (event["message"] for event in warnings[:2])
    assert foretold.startswith("the last batch of an epoch has 1 row for 2 processes")
    assert "dataset.drop_last: true" in foretold
    assert "global_rows" in foretold
    assert "became NaN in step 13: its share of that batch has no rows (1 row for 2 processes)" in told
    assert warnings[0]["seq"] < run.events("metric", "metrics")[0]["seq"]
    losses = run.losses()
    assert math.isfinite(losses[13])  # the empty share weighs nothing
    assert not math.isfinite(float(losses[14]))


def test_an_exception_over_an_empty_share_says_so(tmp_path: Path) -> None:
    refusing = {"trainer": "parallel_mlp:MeanLoss", "hyperparams": {"refuse": True}, "validate_every": 0}
    run = parallel_run(tmp_path, 3, **refusing, dataset={"batch_size": 12})
    assert run.work().returncode == 14
    (failed,) = run.events("failed")
    assert "ValueError: expected more than 0 values per channel" in failed["error"]
    assert "of this batch has no rows (1 row for 3 processes): set dataset.drop_last: true" in failed["error"]


def test_the_error_of_the_rank_that_failed_first_is_the_one_that_is_told(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2)
    done = run.work(FAULT="raise", FAULT_AT_STEP="8")
    assert done.returncode == 14, done.stderr
    (failed,) = run.events("failed")
    assert failed["category"] == "train-step"
    assert failed["error"].startswith("process 1 of 2: ValueError: the loss of this rank is not what it was")
    assert "parallel_mlp.py:" in failed["error"]
    run.check_invariants()


def test_a_run_saved_by_four_processes_goes_on_with_two_on_the_same_rows(tmp_path: Path) -> None:
    without_dropout = {"hyperparams": {}}
    alone = parallel_run(tmp_path / "alone", 1, **without_dropout)
    assert alone.work().returncode == 0
    run = parallel_run(tmp_path / "resharded", 4, **without_dropout, max_steps=20)
    done = run.work()
    assert done.returncode == 0, done.stderr
    run.job |= {"resources": {"processes": 2}, "max_steps": 40}
    done = run.work()
    assert done.returncode == 0, done.stderr
    # The mean of y tells which rows a step saw; the losses agree as far as sums of floats in another order do.
    for name in ("y", "train/loss", "val/y", "val/loss"):
        expected = values(alone, name)
        assert expected
        assert values(run, name) == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert [event["rows"] for event in run.events("validation")] == [21] * 4
    run.check_invariants()


# Everything that has a state of its own: dropout, schedule, accumulation, bf16, averaged weights.
RUNNER: dict[str, Any] = {
    "model": {"type": "mlp", "args": {"out_features": 1, "hidden": [16, 16], "dropout": 0.3}},
    "columns": {"inputs": {"x": "x"}, "target": {"column": "y", "shape": [1]}},
    "loss": "mse",
    "metrics": {"r2": "R2Score"},
    "learning_rate": 0.01,
    "scheduler": {"name": "warmup_cosine", "args": {"warmup_steps": 7, "total_steps": 40}},
    "gradient_accumulation": 2,
    "gradient_clip_norm": 1.0,
    "ema": {"decay": 0.95, "every": 2},
    "threads": 1,
}
ENDING = """\
import os, signal
from gen_worker.trainer import Callback

class Ending(Callback):
    def on_batch_end(self, run, batch, result):
        if run.ctx.rank == 1 and run.state.step == int(os.environ.get("TERM_AT_STEP", "0")):
            os.kill(os.getpid(), signal.SIGTERM)
"""


def runner_run(folder: Path, processes: int, hyperparams: dict[str, Any], **changes: Any) -> Run:
    settings = {
        "trainer": "gen_worker.pytorch_runner:PyTorchTrainer",
        "hyperparams": hyperparams,
        "early_stopping": {"patience": 50},
        **changes,
    }
    return parallel_run(folder, processes, **settings)


def test_the_runner_under_ddp_resumes_to_the_bit_with_all_that_has_a_state(tmp_path: Path) -> None:
    ends: list[dict[str, Any]] = []
    for name, stops in (("straight", []), ("stopped", ["13", "25"])):
        run = runner_run(tmp_path / name, 2, RUNNER, precision="bf16", callbacks=["ending:Ending"])
        (run.folder / "ending.py").write_text(ENDING)
        for step in stops:
            stopped = run.work(TERM_AT_STEP=step, PYTHONPATH=str(run.folder))
            assert stopped.returncode == 75, stopped.stderr
        done = run.work(PYTHONPATH=str(run.folder))
        assert done.returncode == 0, done.stderr
        run.check_invariants()
        ends.append({**fingerprint(run), "r2": values(run, "val/r2")})
    assert ends[0] == ends[1]
    assert len(ends[0]["r2"]) == 4


def test_what_fsdp_saves_is_whole_and_one_process_goes_on_with_it(tmp_path: Path) -> None:
    model = {"type": "mlp", "args": {"out_features": 1, "hidden": [16, 16]}}
    plain = {**RUNNER, "model": model, "strategy": "fsdp"}
    alone = runner_run(tmp_path / "alone", 1, plain)
    assert alone.work().returncode == 0
    run = runner_run(tmp_path / "sharded", 2, plain, max_steps=20)
    done = run.work()
    assert done.returncode == 0, done.stderr
    run.job |= {"resources": {"processes": 1}, "max_steps": 40}
    done = run.work()
    assert done.returncode == 0, done.stderr
    for name in ("train/loss", "val/loss"):
        assert values(run, name) == pytest.approx(values(alone, name), rel=1e-3, abs=1e-5)
    run.check_invariants()


def test_the_first_save_names_what_a_plain_load_state_dict_cannot_load(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2, trainer="counted_shards:CountedFsdp", max_steps=6, checkpoint_every=3)
    done = run.work(COUNTS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    # Weights and momentum of two layers with a bias each, three times; and the most that lived at once.
    assert (tmp_path / "rank-0").read_text() == "24 8"
    assert (tmp_path / "rank-1").read_text() == "24 1"
    (warning,) = (event for event in run.events("log") if event["level"] == "warning")
    assert "sharded over 2 processes: model.0.weight, model.0.bias, model.3.weight" in warning["message"]
    assert "set_model_state_dict" in warning["message"]
    assert warning["seq"] < run.events("checkpoint")[0]["seq"]
    # What it says is true: several processes cannot resume, one can.
    run.job |= {"max_steps": 9}
    failed = run.work(COUNTS=str(tmp_path))
    assert failed.returncode == 13
    assert "set_model_state_dict" in run.events("failed")[-1]["error"]
    run.job |= {"resources": {"processes": 1}}
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert len([event for event in run.events("log") if "sharded over" in event["message"]]) == 1
    run.check_invariants()


def test_a_complete_run_is_complete_also_where_its_processes_abort_at_their_exit(tmp_path: Path) -> None:
    run = parallel_run(tmp_path, 2, trainer="parallel_mlp:AbortsAtExit", max_steps=2, validate_every=0)
    done = run.work()
    assert done.returncode == 0, done.stderr
    assert run.events()[-1]["event"] == "completed"
