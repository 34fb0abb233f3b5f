"""Runs on people's own data: interrupted in any way, they end as the run that never was; nothing outlives them."""

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from worker_process import DEADLINE_S, Run

from gen_worker.contract.lease import RunLease

JOB: dict[str, Any] = {
    "trainer": "own_rows:OwnMlp",
    "max_steps": 30,  # 13 are an epoch
    "metric_every": 1,
    "checkpoint_every": 6,
    "seed": 7,
}
SOURCES: dict[str, dict[str, Any]] = {
    "rows": {"source": "own_rows:Rows", "args": {"num_rows": 100}, "batch_size": 8, "shuffle": True},
    "stream": {"source": "own_rows:Stream", "batch_size": 8},
    "loader": {"source": "own_rows:make_loader"},
    "workers": {"source": "own_rows:make_loader", "args": {"num_workers": 2, "persistent_workers": True}},
}
HELD_OUT = {"dataset": {"source": "own_rows:Rows", "args": {"num_rows": 9, "seed": 1}, "batch_size": 4}}


def fingerprint(run: Run) -> dict[str, Any]:
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    return {
        "weights": hashlib.sha256((run.checkpoints / "final.pt").read_bytes()).hexdigest(),
        "state": meta["state"],
        "rng": meta["rng"],
        "cursor": meta["cursor"],
        "losses": run.losses(),
    }


@pytest.mark.parametrize("name", SOURCES)
def test_three_resumes_in_a_row_end_as_the_run_that_was_not_interrupted(tmp_path: Path, name: str) -> None:
    """A kill in mid-epoch, a stop at the end of an epoch, another kill; with validation, which changes nothing."""
    straight = Run(tmp_path / "straight", **JOB, dataset=SOURCES[name])
    done = straight.work()
    assert done.returncode == 0, done.stderr
    assert sorted(straight.losses()) == list(range(1, 31))
    run = Run(tmp_path / "run", **JOB, dataset=SOURCES[name], validation=HELD_OUT, validate_every=7)
    assert run.work(KILL_AT_STEP="10").returncode == -signal.SIGKILL
    stopped = run.work(TERM_AT_STEP="13")
    assert stopped.returncode == 75, stopped.stderr
    assert run.work(KILL_AT_STEP="23").returncode == -signal.SIGKILL
    last = run.work()
    assert last.returncode == 0, last.stderr
    found, expected = fingerprint(run), fingerprint(straight)
    for part in expected:
        assert found[part] == expected[part], part
    run.check_invariants()
    said = [event["message"] for event in run.events("log") if "again, up to batch" in event["message"]]
    assert bool(said) == (name == "stream"), said


def test_two_processes_resume_to_the_bit(tmp_path: Path) -> None:
    """Of the rows, one is left for the last batch: a process has none of it, and the mean is over one row."""
    job = {
        **JOB,
        "trainer": "own_rows:OwnParallel",
        "resources": {"processes": 2},
        "max_steps": 12,
        "checkpoint_every": 5,
        "dataset": {"source": "own_rows:Rows", "args": {"num_rows": 49}, "batch_size": 8, "shuffle": True},
    }
    straight, run = Run(tmp_path / "straight", **job), Run(tmp_path / "run", **job)
    done = straight.work()
    assert done.returncode == 0, done.stderr
    assert [event for event in straight.events("log") if event["level"] == "error"] == []
    assert run.work(FAULT="kill", FAULT_AT_STEP="8").returncode != 0
    last = run.work()
    assert last.returncode == 0, last.stderr
    assert fingerprint(run) == fingerprint(straight)


def test_a_finished_run_without_a_length_is_finished(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **{**JOB, "max_steps": None, "epochs": 2}, dataset=SOURCES["stream"])
    assert run.work().returncode == 0
    again = run.work()
    assert again.returncode == 0, again.stderr
    assert sorted(run.losses()) == list(range(1, 27))
    assert "the run is finished at step 26" in run.events("log")[-1]["message"]
    run.job["epochs"] = 3
    more = run.work()
    assert more.returncode == 0, more.stderr
    assert max(run.losses()) == 39


HANG = """
import time
from own_rows import OwnMlp

class Hang(OwnMlp):
    def train_step(self, batch, state, ctx):
        result = super().train_step(batch, state, ctx)
        if ctx.step == 3:
            print("hanging", flush=True)
            while not ctx.is_canceled:
                time.sleep(0.05)
        return result
"""


def start_hanging(folder: Path) -> tuple[Run, subprocess.Popen[str]]:
    """A run in the middle of a step, with two DataLoader workers that would stay for the next epoch."""
    (folder / "own_hang.py").write_text(HANG)
    data = {"source": "own_rows:make_loader", "args": {"num_workers": 2, "persistent_workers": True}}
    run = Run(folder / "run", **{**JOB, "trainer": "own_hang:Hang", "checkpoint_every": 2}, dataset=data)
    _, environ = run.command()
    worker = run.start(PYTHONPATH=f"{folder}:{environ['PYTHONPATH']}")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "hanging\n"
    return run, worker


def loader_workers_of(worker: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(worker.pid).children(recursive=True)
    found = [child for child in children if "checkpoints.writing.writer" not in " ".join(child.cmdline())]
    assert len(found) == 2
    return found


def test_ctrl_c_stops_after_the_step_and_ends_the_workers_of_a_loader(tmp_path: Path) -> None:
    """A terminal sends it to all of them at once."""
    run, worker = start_hanging(tmp_path)
    loader_workers = loader_workers_of(worker)
    for process in (*loader_workers, psutil.Process(worker.pid)):
        process.send_signal(signal.SIGINT)
    _, stderr = worker.communicate(timeout=DEADLINE_S)
    assert worker.returncode == 75, stderr
    (failed,) = run.events("failed")
    assert (failed["category"], failed["step"]) == ("cancelled", 4)
    assert psutil.wait_procs(loader_workers, timeout=DEADLINE_S)[1] == []


def test_a_kill_leaves_neither_the_lease_nor_worker_processes(tmp_path: Path) -> None:
    """The workers of a DataLoader are forks of the worker, and have its files."""
    run, worker = start_hanging(tmp_path)
    loader_workers = loader_workers_of(worker)
    for child in loader_workers:
        child.suspend()  # so that the lease is free while they are still there
    try:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        RunLease.acquire(run.checkpoints, run_id=run.job["run_id"], wait_s=DEADLINE_S).release()
        assert all(child.is_running() for child in loader_workers)
    finally:
        for child in loader_workers:
            child.resume()
    _, alive = psutil.wait_procs(loader_workers, timeout=DEADLINE_S)
    assert alive == []
    worker.communicate()


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"source": "own_rows:Row"}, "dataset.source: module 'own_rows'"),
        ({"source": "own_rows:Rows", "args": {"rows": 3}}, "dataset.args: own_rows:Rows(num_rows: int = 100"),
        (
            {"source": "own_rows:make_loader", "batch_size": 4},
            "batch_size is 4, but the data is a DataLoader",
        ),
    ],
)
def test_a_source_that_cannot_be_used_fails_in_plain_words(
    tmp_path: Path, dataset: dict[str, Any], said: str
) -> None:
    run = Run(tmp_path / "run", **JOB, dataset=dataset)
    done = run.work()
    assert done.returncode in (10, 11), done.stderr
    (failed,) = run.events("failed")
    assert said in failed["error"]
    assert "Traceback" not in failed["error"]
