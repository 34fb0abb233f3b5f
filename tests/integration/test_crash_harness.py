"""Kill the worker at every durable step; whatever the moment, the run goes on and ends with the same bits.

`failpoints.ALL` lists every durable boundary, so a new one cannot be left out of this test.
"""

import hashlib
import json
from pathlib import Path

import pytest
from worker_process import Run

from gen_worker.contract import failpoints
from gen_worker.trainer.checkpoints.store import CheckpointStore

STEPS = 24


def new_run(folder: Path) -> Run:
    return Run(
        folder,
        mock_batches=list(range(1, STEPS + 1)),
        metric_every=1,
        checkpoint_every=4,
        checkpoints={"keep_last": 2, "keep_best": 1},
    )


@pytest.fixture(scope="module")
def final_digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = new_run(tmp_path_factory.mktemp("reference"))
    assert run.work().returncode == 0
    return digest(run)


def digest(run: Run) -> str:
    return hashlib.sha256((run.checkpoints / "final.pt").read_bytes()).hexdigest()


@pytest.mark.parametrize("action", ["kill", "enospc"])
@pytest.mark.parametrize("name", failpoints.ALL)
def test_a_fault_at_any_durable_boundary_loses_nothing(
    tmp_path: Path, final_digest: str, name: str, action: str
) -> None:
    run = new_run(tmp_path / "run")
    newest_before = 0
    for nth in (1, 2, 3) if action == "kill" else (2,):
        run.work(GEN_WORKER_FAILPOINTS=f"{name}={action}@{nth}")
        run.wait_for_writer()
        run.check_invariants()
        newest, _ = CheckpointStore(run.checkpoints).newest_verified()
        newest_step = 0 if newest is None else newest.step
        assert newest_step >= newest_before, "a fault must never take away what was verified before"
        newest_before = newest_step
    done = run.work()
    assert done.returncode == 0, done.stderr
    run.check_invariants()
    assert digest(run) == final_digest
    assert run.losses()[STEPS] == sum(range(1, STEPS + 1))
    assert sorted(run.losses()) == list(range(1, STEPS + 1)), "every step's metric is in the file"
    left = {path.name for path in run.checkpoints.iterdir() if ".tmp" in path.name or "damaged" in path.name}
    assert left == set()
    assert len(list(run.checkpoints.glob("step-*.meta.json"))) <= 3
    meta = json.loads((run.checkpoints / "final.meta.json").read_text())
    assert meta["verified"] is True
