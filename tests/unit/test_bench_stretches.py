"""Runs that take turns: how many steps each stretch has, and what is told of a run that ends. No timings."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

RUN = """
import sys
from stretches import Stretches
stretches = Stretches()
steps = open(sys.argv[1], "w")
for step in range(int(sys.argv[2])):
    stretches.tick()
    print(step, file=steps, flush=True)
print("trained to the end")
"""


@pytest.fixture
def stretches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("stretches")


@pytest.fixture
def start(stretches: ModuleType, tmp_path: Path):  # type: ignore[no-untyped-def]
    runs = []

    def start_run(plan: object, code: str = RUN, steps: int | None = None) -> object:
        total = plan.total_steps if steps is None else steps  # type: ignore[attr-defined]
        command = [sys.executable, "-c", code, str(tmp_path / "steps"), str(total)]
        runs.append(stretches.TimedRun(command, {}, plan, log_path=tmp_path / "log"))
        return runs[-1]

    yield start_run
    for run in runs:
        run._end()


def test_a_stretch_has_its_steps_and_the_run_waits_after_each(
    stretches: ModuleType, start, tmp_path: Path
) -> None:
    plan = stretches.Plan(num_stretches=3, warm_steps=2, steps=5)
    run = start(plan)
    for number in range(1, plan.num_stretches + 1):
        assert set(run.run_stretch()) == {"step_us", "cpu_us", "page_faults"}
        if number < plan.num_stretches:
            # It waits before the step that would be the next one.
            assert (tmp_path / "steps").read_text().split() == [str(n) for n in range(7 * number - 1)]
    run._end()
    assert run._process.returncode == 0
    assert len((tmp_path / "steps").read_text().split()) == plan.total_steps
    assert (tmp_path / "log").read_text() == "trained to the end\n"


def test_a_run_that_nobody_asks_any_more_ends(stretches: ModuleType, start, tmp_path: Path) -> None:
    run = start(stretches.Plan(num_stretches=9, warm_steps=1, steps=1))
    run.run_stretch()
    run._end()
    assert run._process.returncode == 1
    assert "nobody asks for another stretch" in (tmp_path / "log").read_text()


def test_a_run_that_fails_in_a_stretch_is_told_with_its_last_words(stretches: ModuleType, start) -> None:
    run = start(stretches.Plan(num_stretches=2, warm_steps=1, steps=50), steps=10)
    with pytest.raises(RuntimeError, match="the run ended: trained to the end"):
        run.run_stretch()


def test_a_run_that_does_not_start_is_told_with_its_last_words(stretches: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import a_peer_that_is_not_installed"]
    plan = stretches.Plan(num_stretches=1, warm_steps=1, steps=1)
    with pytest.raises(
        RuntimeError, match=r"first step: ModuleNotFoundError: .*a_peer_that_is_not_installed"
    ):
        stretches.TimedRun(command, {}, plan, log_path=tmp_path / "log")


def test_without_anyone_who_asks_a_tick_does_nothing(
    stretches: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(stretches.VARIABLE, raising=False)
    ticking = stretches.Stretches()
    for _ in range(5):
        ticking.tick()
