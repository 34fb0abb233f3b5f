"""The short form of the soak: nothing is lost, doubled or stuck while daemon, launcher and workers are killed."""

import asyncio
from pathlib import Path

import pytest
from fault_harness import FaultHarness


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_faulty_time_loses_nothing(tmp_path: Path, seed: int) -> None:
    harness = FaultHarness(tmp_path, num_runs=25, num_faults=25, seed=seed)
    report = asyncio.run(harness.run())
    print(report)
    assert report.faults == [], str(report)
    assert report.counts["runs in the registry"] == 25
