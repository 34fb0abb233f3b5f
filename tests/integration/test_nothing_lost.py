"""The short form of the soak: nothing is lost, doubled or stuck while everything that can fail is made to fail."""

import asyncio
from pathlib import Path

import pytest
from fault_harness import OTHER_KINDS, FaultHarness
from fault_strikes import SHARES
from warm_python import launchers_folder

NUM_RUNS = 20
NUM_FAULTS = sum(SHARES.values())  # every kind of fault strikes


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_faulty_time_loses_nothing(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", launchers_folder()
    )  # launchers are killed, and each new one would import torch
    harness = FaultHarness(tmp_path, num_runs=NUM_RUNS, num_faults=NUM_FAULTS, seed=seed)
    report = asyncio.run(harness.run())
    print(report)
    assert report.faults == [], str(report)
    assert report.counts["runs in the registry"] >= NUM_RUNS
    never = {name for name in (*SHARES, *OTHER_KINDS) if not report.struck[name]}
    assert never == set(report.left_out), str(report)
    assert any(
        number for name, number in report.struck.items() if name.startswith("daemon killed at registry")
    )
