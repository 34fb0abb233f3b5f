"""What the benchmarks of `Trainer`, of several processes and of the runner stand on. No timings."""

import json
import threading
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A module of the benchmarks, which are scripts beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("BENCH_SCRATCH", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm-256color")
    return import_module


def _measured(load: Any, **values: list[dict[str, float]]) -> Any:
    return load("harness").Measurements(samples=values)


def test_every_topic_has_its_module(load: Any) -> None:
    for topic in load("run").TOPICS:
        assert callable(load(f"{topic}_bench").run)


def test_ratio_and_difference_are_those_of_one_round(load: Any) -> None:
    measured = _measured(
        load, ours=[{"rate": 2.0}, {"rate": 9.0}, {"rate": 5.0}], hand=[{"rate": 4.0}, {"rate": 3.0}]
    )
    for other in ("hand", "nobody"):
        measured.note_pair("ours", other, ratio_of="rate", difference_of="rate")
    assert measured.samples["ours"] == [
        {"rate": 2.0, "ratio": 0.5, "difference": -2.0},
        {"rate": 9.0, "ratio": 3.0, "difference": 6.0},
        {"rate": 5.0},
    ]
    assert measured.spread("ours", "ratio").median == 1.75


def test_a_result_has_a_line_for_each_sample_and_is_the_same_json(load: Any, tmp_path: Path) -> None:
    document = {
        "note": 'braces {"in": 1}, [brackets]\nand lines',
        "empty": {},
        "samples": {"a side": [{"us": 1.5, "ratio": -2e-07}, {"us": 2.5, "ratio": 1.0}], "none": []},
    }
    path = tmp_path / "result.json"
    load("report").write_json(path, document)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == document
    assert [line.strip() for line in text.splitlines() if "us" in line] == [
        '{"us": 1.5, "ratio": -2e-07},',
        '{"us": 2.5, "ratio": 1.0}',
    ]


def test_sittings_are_joined_and_a_failure_in_one_is_kept(load: Any) -> None:
    measured = _measured(load)
    measured.append(_measured(load, ours=[{"rate": 1.0}], hand=[{"rate": 2.0}]))
    measured.append(
        load("harness").Measurements(samples={"ours": [{"rate": 3.0}]}, failures={"hand": "died"})
    )
    assert measured.samples == {"ours": [{"rate": 1.0}, {"rate": 3.0}], "hand": [{"rate": 2.0}]}
    assert measured.failures == {"hand": "died"}


def test_the_runner_is_held_against_the_hand_written_side_of_the_same_rounds(load: Any) -> None:
    bench = load("runner_bench")

    def samples(*rates: float) -> list[dict[str, float]]:
        return [{"rows_per_s": rate, "step_us": 64e6 / rate} for rate in rates]

    sitting = _measured(load, **{bench.OURS: samples(90, 900, 9), bench.HAND: samples(100, 800, 10)})
    sitting.note_pair(bench.OURS, bench.HAND, ratio_of="rows_per_s", difference_of="step_us")
    measured = _measured(load)
    measured.append(sitting)
    against, difference, rate = bench.build_rows(measured, bench.MODELS[0])
    assert (against.judged, against.verdict) == (0.9, "FAIL")
    assert difference.ours is not None
    assert difference.verdict == ""
    assert [side.spread and side.spread.median for side in rate.beside] == [100.0, None]


def test_a_peer_that_is_not_installed_is_shown_and_ours_is_judged_all_the_same(load: Any) -> None:
    bench = load("trainer_bench")
    measured = load("harness").Measurements(
        samples={bench.OURS: [{"more_us": 3.0, "above_us": 5.0}], bench.LIGHTNING: []},
        failures={bench.LIGHTNING: "ModuleNotFoundError: No module named 'lightning'"},
    )
    rows = bench.build_rows(measured)
    assert rows[1].verdict == "pass"
    table = "\n".join(load("report").table_lines(rows))
    assert table.count("not measured: ModuleNotFoundError: No module named 'lightning'") == 2


def test_the_terminal_takes_everything_and_counts_it(load: Any) -> None:
    with load("pseudo_terminal").PseudoTerminal() as terminal:
        assert terminal.stream.isatty()
        for _ in range(2_000):
            terminal.stream.write("a hundred thousand bytes are more than a terminal holds by itself")
    assert terminal.num_bytes == 2_000 * 65


@pytest.mark.parametrize("callbacks", ["no_callbacks", "three_that_look_on", "three_shipped"])
def test_a_trainer_is_clocked_from_its_first_step_to_its_last(load: Any, callbacks: str) -> None:
    sides, work = load("trainer_sides"), load("loop_work")
    drive = sides.drive_trainer(
        sides.ValidatedNull(), getattr(sides, callbacks), held_out=[object()], validate_every=20
    )
    batches = work.ClockedBatches(object(), 49)
    drive(batches)  # asserts its own steps, events and what was drawn
    first, last = batches.span
    assert first < last


def test_what_comes_before_the_clock_is_trained_on_and_not_clocked(load: Any) -> None:
    batches = load("loop_work").ClockedBatches("batch", 5, num_before=3)
    assert list(batches) == ["batch"] * 9
    assert len(batches) == 9
    taken = iter(load("loop_work").ClockedBatches("batch", 2, num_before=1))
    assert next(taken) == "batch"


def test_calls_are_counted_within_a_span(load: Any) -> None:
    class Owner:
        def call(self, value: int) -> int:
            return value + 1

    calls = load("trainer_sides").CallTimes(Owner, "call")
    assert Owner().call(1) == 2
    (moment,) = calls.times
    assert calls.count_in((moment - 1, moment + 1)) == 1
    assert calls.count_in((moment + 1, moment + 2)) == 0


def test_the_reader_by_hand_gives_each_process_its_part_of_every_batch(load: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    files = []
    for number in range(2):
        rows = range(number * 16, number * 16 + 16)
        x = pa.FixedSizeListArray.from_arrays(
            pa.array([float(row) for row in rows for _ in range(3)], pa.float32()), 3
        )
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"x": x, "label": pa.array(rows, pa.int64())}), path, row_group_size=8)
        files.append(str(path))
    data: ModuleType = load("training_data")
    for rank in range(2):
        batches = data.read_by_hand(files, 4, rank=rank, world_size=2)
        found = [next(batches) for _ in range(9)]
        batches.close()
        rows = [row for row in range(32) if row % 4 // 2 == rank]
        expected = [rows[at : at + 2] for at in range(0, 16, 2)] + [rows[:2]]
        assert [label.tolist() for _, label in found] == expected
        assert [x.tolist() for x, _ in found] == [[[float(row)] * 3 for row in each] for each in expected]
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.parametrize("name", ["mlp", "small mlp", "cnn"])
def test_the_model_by_hand_has_the_runners_weights(load: Any, name: str) -> None:
    pytest.importorskip("torch")
    from gen_worker.pytorch.model.build import build_model
    from gen_worker.pytorch.sections import read_runner_config

    section = {**load("runner_sides").model_section(name), "loss": "cross_entropy", "optimizer": "AdamW"}
    config = read_runner_config(section, source="benchmarks")
    row_shape = (1, 28, 28) if name == "cnn" else (256,)
    ours = build_model(config.model, seed=0, row_shape=row_shape, device="cpu")
    hand = load("runner_hand").build(name)
    assert [value.shape for value in ours.parameters()] == [value.shape for value in hand.parameters()]
    assert [model.name for model in load("runner_bench").MODELS if model.name == name] == [name]
