"""Retention of samples in real workers: beside that of checkpoints, and what a kept checkpoint shows stays with it."""

from pathlib import Path

import pytest
from worker_process import Run

from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.errors import SpecError


def shown(run: Run) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run.folder / "artifacts" / "samples").glob("step-*"))


def sampling_run(folder: Path, **job: object) -> Run:
    options = {"metric_every": 1, "sample_every": 1, "sample_prompts": ["a"], "checkpoint_every": 3}
    return Run(folder, trainer="counting:Sampling", mock_batches=list(range(1, 13)), **options, **job)


def test_a_worker_keeps_the_samples_of_the_last_the_best_and_the_checkpoints_steps(tmp_path: Path) -> None:
    checkpoints = {"keep_last": 2, "keep_best": 0}
    run = sampling_run(tmp_path / "run", artifacts={"keep_last": 2, "keep_best": 1}, checkpoints=checkpoints)
    assert run.work().returncode == 0
    saved = sorted(path.name for path in run.checkpoints.glob("*.meta.json"))
    assert saved == ["final.meta.json", "step-00000009.meta.json", "step-00000012.meta.json"]
    assert shown(run) == [1, 9, 11, 12]  # the loss grows: the first step is the best
    assert [event["step"] for event in run.events("sample")] == list(range(1, 13))


def test_by_default_a_worker_keeps_all_samples(tmp_path: Path) -> None:
    run = sampling_run(tmp_path / "run")
    assert run.work().returncode == 0
    assert shown(run) == list(range(1, 13))


def test_the_best_alone_cannot_be_kept() -> None:
    job = {"run_id": "r", "mock_batches": [1], "artifacts": {"keep_best": 2}}
    with pytest.raises(
        SpecError, match=r"artifacts\.keep_best.*`artifacts\.keep_last` is 0, which keeps all"
    ):
        parse_job_spec(job, source="job")
    assert parse_job_spec({**job, "artifacts": {"keep_last": 1, "keep_best": 2}}, source="job")
