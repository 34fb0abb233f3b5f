"""The benchmarks' own arithmetic: order, medians, bars, table. No timings."""

import importlib.util
import itertools
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _load(name: str) -> ModuleType:
    """Benchmarks are scripts beside the package, not a package: load them by path."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


harness = _load("harness")
bars = _load("bars")
environments = _load("environments")
report = _load("report")

SCRIPT = """
import sys
sys.path.insert(0, {benchmarks!r})
from harness import serve

def counting(options):
    rounds = [options["start"]]
    def run_round():
        rounds[0] += 1
        print("noise that a library prints")
        return {{"value": rounds[0]}}
    return run_round

def lacking(options):
    import a_peer_that_is_not_installed

def dying(options):
    def run_round():
        raise RuntimeError("died in " + {benchmarks!r})
    return run_round

serve({{"counting": counting, "lacking": lacking, "dying": dying}})
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "sides.py"
    path.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS)))
    return str(path)


def _spread(median: float) -> object:
    return harness.Spread(median=median, low=median, high=median, num_samples=1)


def _row(ours: float | None, bar: object, **beside: float | None) -> object:
    return bars.Row(
        what="work",
        unit="ms",
        ours=None if ours is None else _spread(ours),
        reason="" if ours is not None else "broken",
        bar=bar,
        beside=tuple(
            bars.Beside(
                name=name,
                spread=None if value is None else _spread(value),
                reason="" if value is not None else "No module named 'peer'",
            )
            for name, value in beside.items()
        ),
    )


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=15))
def test_a_summary_is_the_median_between_the_extremes(values: list[float]) -> None:
    spread = harness.summarize(values)
    assert spread.low == min(values)
    assert spread.high == max(values)
    assert sum(value < spread.median for value in values) <= len(values) / 2
    assert sum(value > spread.median for value in values) <= len(values) / 2
    assert spread.num_samples == len(values)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_every_round_has_every_side_once(num_sides: int, num_rounds: int, seed: int) -> None:
    names = [f"side {n}" for n in range(num_sides)]
    order = list(harness.interleave(names, num_rounds, seed=seed))
    assert [number for number, _ in order] == sorted(number for number, _ in order)
    assert Counter(order) == Counter((number, name) for number in range(num_rounds) for name in names)


def test_the_order_is_new_in_each_round() -> None:
    names = [f"side {n}" for n in range(8)]
    order = [name for _, name in harness.interleave(names, 5, seed=1)]
    rounds = {tuple(order[start : start + 8]) for start in range(0, 40, 8)}
    assert len(rounds) == 5


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_slow_side_takes_part_in_the_first_round_and_in_as_many_as_it_may(
    num_rounds: int, most: int
) -> None:
    taken = [number for number in range(num_rounds) if harness.takes_part(number, num_rounds, most)]
    assert taken[0] == 0
    assert len(taken) == min(most, num_rounds)
    gaps = {later - earlier for earlier, later in itertools.pairwise(taken)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("ours", "bar", "beside", "judged", "verdict"),
    [
        (1.4, {"limit": 1.5}, {}, 1.4, "pass"),
        (1.6, {"limit": 1.5}, {}, 1.6, "FAIL"),
        (40.0, {"limit": 5, "against": ("pass",)}, {"pass": 10.0}, 4.0, "pass"),
        (60.0, {"limit": 5, "against": ("pass",)}, {"pass": 10.0}, 6.0, "FAIL"),
        (90.0, {"limit": 0.9, "at_least": True, "against": ("a", "b")}, {"a": 50.0, "b": 100.0}, 0.9, "pass"),
        (
            90.0,
            {"limit": 0.9, "at_least": True, "against": ("a", "b")},
            {"a": 50.0, "b": 120.0},
            0.75,
            "FAIL",
        ),
        (90.0, {"limit": 2, "against": ("a", "b")}, {"a": 50.0, "b": 40.0}, 2.25, "FAIL"),
        (90.0, {"limit": 0.9, "at_least": True, "against": ("a", "b")}, {"a": None, "b": 100.0}, 0.9, "pass"),
        (90.0, {"limit": 0.9, "at_least": True, "against": ("a",)}, {"a": None}, None, "not judged"),
        (None, {"limit": 1.5}, {}, None, "not judged"),
    ],
)
def test_a_bar_is_held_against_the_strongest_side_that_was_measured(
    ours: float | None, bar: dict, beside: dict, judged: float | None, verdict: str
) -> None:
    row = _row(ours, bars.Bar(**bar), **beside)
    assert row.judged == judged
    assert row.verdict == verdict


def test_a_row_survives_its_json() -> None:
    row = _row(3.0, bars.Bar(limit=2, against=("a",), text="a thing"), a=2.0, b=None)
    assert bars.row_from_json(json.loads(json.dumps(bars.row_as_json(row)))) == row


def test_a_peer_that_was_not_measured_is_in_the_table_with_its_reason() -> None:
    text = "\n".join(report.table_lines([_row(3.0, bars.Bar(limit=5), peer=None)]))
    assert "not measured: No module named 'peer'" in text
    assert "pass" in text


def test_the_tables_lines_have_equal_widths_and_columns() -> None:
    lines = report.table_lines(
        [_row(3.0, bars.Bar(limit=5, against=("a",)), a=2.0, b=None), _row(None, None)]
    )
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {len(report.HEADS) + 1}


def test_the_markdown_says_how_many_bars_were_met() -> None:
    rows = [_row(1.0, bars.Bar(limit=5)), _row(9.0, bars.Bar(limit=5)), _row(9.0, None)]
    text = report.render_markdown(
        date="2026-01-01", mode="full", machine=report.describe_machine(), rows=rows, topics={}
    )
    assert "1 of 2 bars met" in text


def test_a_part_of_a_run_keeps_the_other_topics_with_their_own_date(tmp_path: Path) -> None:
    run = _load("run")
    assert run.read_newest_topics(tmp_path) == {}
    for date, topics in (
        ("2026-01-01", {"loop": {}}),
        ("2026-02-01", {"loop": {}, "cli": {"date": "2026-01-15"}}),
    ):
        document = {"format_version": run.FORMAT_VERSION, "date": date, "topics": topics}
        (tmp_path / f"{date}.json").write_text(json.dumps(document))
    assert run.read_newest_topics(tmp_path) == {"loop": {"date": "2026-02-01"}, "cli": {"date": "2026-01-15"}}


def test_a_kept_side_counts_on_and_a_fresh_one_starts_anew(script: str) -> None:
    side = harness.Side(name="s", function="counting", options={"start": 5})
    kept = harness.measure(script, [side], num_rounds=3, fresh=False)
    fresh = harness.measure(script, [side], num_rounds=2, fresh=True)
    assert [sample["value"] for sample in kept.samples["s"]] == [6, 7, 8]
    assert [sample["value"] for sample in fresh.samples["s"]] == [6, 6]
    assert not kept.failures


def test_a_side_that_cannot_be_measured_keeps_its_reason_and_stops_nobody(script: str) -> None:
    sides = [
        harness.Side(name="lacking", function="lacking"),
        harness.Side(name="dying", function="dying"),
        harness.Side(name="well", function="counting", options={"start": 0}, max_rounds=1),
    ]
    measured = harness.measure(script, sides, num_rounds=2, fresh=False)
    assert "a_peer_that_is_not_installed" in measured.failures["lacking"]
    assert "RuntimeError: died in" in measured.failures["dying"]
    assert str(BENCHMARKS.parent) not in measured.failures["dying"]
    assert measured.samples["well"] == [{"value": 1}]


def test_no_result_that_is_kept_names_a_machine_or_a_place() -> None:
    home = re.compile(r"/(home|root|work|tmp|Users)/")
    for path in (BENCHMARKS / "results").glob("*"):
        assert not home.search(path.read_text(encoding="utf-8")), path.name
