"""The short form of the soak of a model server: answers are right, once, and of the version that they name."""

import asyncio
from pathlib import Path

import pytest
from serving_harness import ServingHarness
from serving_strikes import SHARES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1])
def test_a_faulty_time_of_a_server_makes_no_answer_wrong(tmp_path: Path, seed: int) -> None:
    harness = ServingHarness(tmp_path, num_faults=sum(SHARES.values()), seed=seed)
    report = asyncio.run(harness.run())
    print(report)
    assert report.faults == [], str(report)
    assert {name for name in SHARES if not report.struck[name]} == set(), str(report)
    assert report.counts["answers whose bits were compared"] > 0
    assert report.counts["requests with 429"] > 0
    assert report.counts["promotions that were done"] > 0
