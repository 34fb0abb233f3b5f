"""What FSDP2 saves is gathered tensor by tensor to the main process alone; kills in the middle of it lose nothing."""

from pathlib import Path
from typing import Any

import pytest
from test_many_processes import RUNNER, fingerprint, runner_run
from worker_process import Run

SHARDED = {
    **RUNNER,
    "model": {"type": "mlp", "args": {"out_features": 1, "hidden": [18, 14, 10]}},
    "strategy": "fsdp",
}
# Weights, their average, and two moments of the optimizer, of four layers with a bias each.
NUM_SHARDED = 4 * 8


def sharded_run(folder: Path, processes: int = 2, **changes: Any) -> Run:
    run = runner_run(folder, processes, SHARDED, trainer="counted_shards:CountedRunner", **changes)
    (folder / "counts").mkdir(exist_ok=True)
    return run


def work(run: Run, **env: str) -> Any:
    return run.work(COUNTS=str(run.folder.parent / "counts"), **env)


def read_counts(run: Run, rank: int) -> tuple[int, int]:
    """(tensors gathered, whole ones that lived at once) of a process."""
    gathered, most = (run.folder.parent / "counts" / f"rank-{rank}").read_text().split()
    return int(gathered), int(most)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = sharded_run(tmp_path_factory.mktemp("reference"), max_steps=12, checkpoint_every=4)
    done = work(run)
    assert done.returncode == 0, done.stderr
    run.check_invariants()
    return run


def test_only_the_main_process_ever_holds_more_than_one_whole_tensor(reference: Run) -> None:
    num_saves = 3 + 1  # and the final one
    assert read_counts(reference, 0) == (num_saves * NUM_SHARDED, NUM_SHARDED)
    assert read_counts(reference, 1) == (num_saves * NUM_SHARDED, 1)
    assert [event for event in reference.events("log") if event["level"] == "warning"] == []


def test_kills_in_the_middle_of_a_sharded_save_change_nothing(tmp_path: Path, reference: Run) -> None:
    run = sharded_run(tmp_path, max_steps=12, checkpoint_every=4)
    for rank, kept in (
        (0, ["step-00000004"]),
        (1, ["step-00000004", "step-00000008"]),
    ):  # in the second save of each
        killed = work(run, KILL_RANK=str(rank), KILL_AT_GATHER=str(NUM_SHARDED + NUM_SHARDED // 2))
        assert killed.returncode == 14, killed.stderr
        assert run.events("failed")[-1]["error"].startswith(f"process {rank} of 2 was killed by SIGKILL")
        assert sorted(path.stem.partition(".")[0] for path in run.checkpoints.glob("*.meta.json")) == kept
    done = work(run)
    assert done.returncode == 0, done.stderr
    run.check_invariants()
    assert fingerprint(run) == fingerprint(reference)
