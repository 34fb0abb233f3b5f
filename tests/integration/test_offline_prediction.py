"""Every row group has one part, whatever happens on the way, and its bits are those that the server answers."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model_processes import Worker, open_parent, train, version_of
from worker_process import TRAINERS, WarmParent, write_rows

from gen_worker.contract import failpoints
from gen_worker.contract.files.hashes import hash_file
from gen_worker.errors import ExitCode
from gen_worker.inference.model.parent import ModelOptions
from gen_worker.inference.offline.part import READ_ROWS

NUM_ROWS, GROUP_ROWS = 500, 120  # the last group is shorter
DEADLINE_S = 240


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


class Prediction:
    """A run of mode inference in its folder."""

    def __init__(self, folder: Path, meta: Path, trainer: str = "serving:ServingMlp", **spec: Any) -> None:
        self.folder = folder
        self.out = folder / "out"
        if not (folder / "in").exists():
            write_rows(folder / "in" / "a.parquet", num_rows=NUM_ROWS, row_group_size=GROUP_ROWS, seed=3)
        self.resources: dict[str, Any] = {}
        self.spec = {
            "version": msgspec.to_builtins(version_of(meta, trainer)),
            "parquet_paths": ["in/*.parquet"],
            "out": "out",
            **spec,
        }

    def start(self, **env: str) -> int:
        """The pid of a worker that somebody has to wait for."""
        job = {
            "trainer_api_version": "v1",
            "run_id": "predicted",
            "mode": "inference",
            "prediction": self.spec,
            "resources": self.resources,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(TRAINERS),
            "WORKER_MODE": "inference",
            "TRAINER_JOB_SPEC_PATH": str(self.folder / "job.json"),
            "TRAINER_ARTIFACTS_DIR": str(self.folder / "artifacts"),
            **env,
        }
        return WarmParent.shared().start(
            {
                "env": environ,
                "cwd": str(self.folder),
                "stdout": str(self.folder / "stdout.log"),
                "stderr": str(self.folder / "stderr.log"),
            }
        )

    def wait(self, pid: int) -> int:
        code = WarmParent.shared().wait(pid)
        self.log = (self.folder / "stderr.log").read_text()
        return code

    def work(self, **env: str) -> int:
        return self.wait(self.start(**env))

    def event(self, kind: str) -> dict[str, Any]:
        """The last one of that kind."""
        lines = (self.folder / "artifacts" / "metrics" / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind][-1]

    def parts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.out / "predictions.json").read_text())["parts"]
        return found

    def answers(self) -> pa.Table:
        return pa.concat_tables([pq.read_table(self.out / part["name"]) for part in self.parts()])

    def names(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())


@pytest.fixture
def prediction(tmp_path: Path, meta: Path) -> Iterator[Prediction]:
    return Prediction(tmp_path, meta)


def test_a_prediction_is_not_written_among_its_rows(prediction: Prediction) -> None:
    prediction.spec["out"] = "in"
    assert prediction.work() == 11
    failed = prediction.event("failed")
    assert failed["category"] == "input"
    assert "in is a part of the data" in failed["error"]
    assert sorted(path.name for path in (prediction.folder / "in").iterdir()) == ["a.parquet"]


def test_the_answers_are_those_of_the_server_bit_for_bit(
    prediction: Prediction, meta: Path, tmp_path: Path
) -> None:
    assert prediction.work() == 0, prediction.log
    table = prediction.answers()
    rows = pq.read_table(tmp_path / "in" / "a.parquet").column("x").combine_chunks()
    x = rows.flatten().to_numpy().reshape(-1, 4)
    with open_parent(tmp_path / "log") as parent:
        worker = Worker(parent, version_of(meta), ModelOptions(max_batch_rows=32))
        worker.ready()
        # Other batches than offline, of the same shape.
        served = [worker.ask(x[start : start + 29], shape=32)[0]["y"] for start in range(0, NUM_ROWS, 29)]
    assert table.column("y").to_numpy().tobytes() == np.concatenate(served).tobytes()


def test_one_part_for_each_row_group_and_a_list_of_them(
    prediction: Prediction, meta: Path, tmp_path: Path
) -> None:
    assert prediction.work() == 0, prediction.log
    listed = json.loads((prediction.out / "predictions.json").read_text())
    assert listed["rows"] == NUM_ROWS
    assert listed["version"]["weights_hash"] == version_of(meta).weights_hash
    parts = listed["parts"]
    assert [part["rows"] for part in parts] == [120, 120, 120, 120, 20]
    assert [part["group"] for part in parts] == [0, 1, 2, 3, 4]
    assert {part["source"] for part in parts} == {str(tmp_path / "in" / "a.parquet")}
    for part in parts:
        assert part["hash"] == hash_file(prediction.out / part["name"])
    assert prediction.names() == sorted([*(part["name"] for part in parts), "predictions.json"])
    done = prediction.event("completed")
    assert (done["step"], done["rows"], done["parts"], done["parts_kept"]) == (500, 500, 5, 0)
    assert prediction.event("log")["end_step"] == NUM_ROWS
    assert prediction.event("metric")["name"] == "predict/rows_per_s"


def test_a_class_that_answers_with_the_same_memory_each_time_is_copied(
    prediction: Prediction, meta: Path
) -> None:
    assert prediction.work() == 0, prediction.log
    expected = prediction.answers().column("y")
    prediction.spec |= {
        "version": msgspec.to_builtins(version_of(meta, "serving:ReusesMemory")),
        "out": "reused",
    }
    prediction.out = prediction.folder / "reused"
    assert prediction.work() == 0, prediction.log
    assert prediction.answers().column("y").equals(expected)


def test_columns_of_the_input_are_copied_beside_the_answers(prediction: Prediction, tmp_path: Path) -> None:
    prediction.spec["columns"] = ["x"]
    assert prediction.work() == 0, prediction.log
    given = pq.read_table(tmp_path / "in" / "a.parquet").column("x")
    assert prediction.answers().column("x").to_pylist() == given.to_pylist()


def test_a_column_that_the_model_answers_is_not_copied_over_it(prediction: Prediction) -> None:
    prediction.spec["columns"] = ["y"]
    assert prediction.work() == ExitCode.INPUT
    assert "the model answers a column 'y'" in prediction.event("failed")["error"]


def test_a_second_run_verifies_what_is_there_and_computes_nothing(prediction: Prediction) -> None:
    assert prediction.work() == 0, prediction.log
    before = {name: (prediction.out / name).stat().st_mtime_ns for name in prediction.names()}
    assert prediction.work() == 0, prediction.log
    assert prediction.event("completed")["parts_kept"] == 5
    after = {name: (prediction.out / name).stat().st_mtime_ns for name in prediction.names()}
    assert {name for name in before if before[name] != after[name]} == {"predictions.json"}


def test_a_damaged_part_is_predicted_again(prediction: Prediction) -> None:
    assert prediction.work() == 0, prediction.log
    whole = prediction.answers()
    path = prediction.out / prediction.parts()[2]["name"]
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1  # in a page
    path.write_bytes(content)
    assert prediction.work() == 0, prediction.log
    assert prediction.event("completed")["parts_kept"] == 4
    assert prediction.answers().equals(whole)


def test_whatever_is_in_the_place_of_a_part_nobody_waits_for_it(prediction: Prediction) -> None:
    assert prediction.work() == 0, prediction.log
    whole = prediction.answers()
    path = prediction.out / prediction.parts()[2]["name"]
    path.unlink()
    os.mkfifo(path)
    (prediction.out / ".a.parquet.99999999-0a.tmp").mkdir()
    assert prediction.work() == 0, prediction.log
    assert prediction.event("completed")["parts_kept"] == 4
    assert prediction.answers().equals(whole)


def test_other_rows_are_other_parts(prediction: Prediction, tmp_path: Path) -> None:
    """Also where the file has the same name, size and row groups as before."""
    assert prediction.work() == 0, prediction.log
    first = prediction.parts()
    path = tmp_path / "in" / "a.parquet"
    table = pq.read_table(path)
    x = table.column("x").combine_chunks().flatten().to_numpy().copy()
    x[4 * 130] += 1.0  # of row 130, in the second group
    changed = pa.FixedSizeListArray.from_arrays(pa.array(x), 4)
    pq.write_table(table.set_column(0, "x", changed), path, row_group_size=GROUP_ROWS)
    assert prediction.work() == 0, prediction.log
    second = prediction.parts()
    assert [one["name"] == other["name"] for one, other in zip(first, second, strict=True)] == [
        True, False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize("name", failpoints.PREDICTION)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_worker_that_is_killed_at_any_step_costs_its_row_group_at_most(
    prediction: Prediction, name: str, nth: int
) -> None:
    """The failpoint is in every process: a worker that takes the place of a killed one passes it, too."""
    first = prediction.work(GEN_WORKER_FAILPOINTS=f"{name}=kill@{nth}")
    if name == "prediction.parts_listed":
        assert first == (-signal.SIGKILL if nth == 1 else 0)
    assert first in (0, -signal.SIGKILL, ExitCode.MODEL_LOAD)
    assert prediction.work() == 0, prediction.log
    parts = prediction.parts()
    assert [part["rows"] for part in parts] == [120, 120, 120, 120, 20]
    assert prediction.names() == sorted(
        [*(part["name"] for part in parts), "predictions.json"]
    )  # no leftovers
    assert prediction.answers().num_rows == NUM_ROWS


def test_several_processes_write_the_same_parts(prediction: Prediction) -> None:
    assert prediction.work() == 0, prediction.log
    alone = {part["name"]: part["hash"] for part in prediction.parts()}
    prediction.spec["out"] = "other"
    prediction.out = prediction.folder / "other"
    prediction.resources = {"processes": 3}
    assert prediction.work() == 0, prediction.log
    assert {part["name"]: part["hash"] for part in prediction.parts()} == alone


def test_a_row_that_raises_fails_the_run_and_names_its_place(prediction: Prediction, tmp_path: Path) -> None:
    spoil(tmp_path / "in" / "a.parquet", row=250, value=1001.0)
    assert prediction.work() == ExitCode.TRAIN_STEP
    failed = prediction.event("failed")
    assert failed["category"] == "train-step"
    assert "this row cannot be predicted; rows 0 to 31 of row group 2" in failed["error"]
    assert "predictions.json" not in prediction.names()


def test_a_row_that_kills_its_worker_twice_fails_the_run_and_names_the_row_group(
    prediction: Prediction, tmp_path: Path
) -> None:
    spoil(tmp_path / "in" / "a.parquet", row=250, value=1002.0)
    assert prediction.work() != 0
    failed = prediction.event("failed")
    assert "was killed by SIGKILL over row group 2 of" in failed["error"]
    assert prediction.event("log")["message"].endswith("it is predicted again")


def test_a_large_row_group_is_decoded_in_pieces_and_loses_no_row(
    prediction: Prediction, meta: Path, tmp_path: Path
) -> None:
    num_rows = 2 * READ_ROWS + 33  # two whole pieces, and one that ends in a batch of one row
    large = write_rows(tmp_path / "in" / "a.parquet", num_rows=num_rows, row_group_size=num_rows, seed=5)
    prediction.spec["columns"] = ["x"]
    assert prediction.work() == 0, prediction.log
    assert len(prediction.parts()) == 1
    answers = prediction.answers()
    assert answers.column("x").to_pylist() == pq.read_table(large).column("x").to_pylist()

    apart = tmp_path / "apart"
    apart.mkdir()
    write_rows(apart / "in" / "a.parquet", num_rows=num_rows, row_group_size=320, seed=5)
    small = Prediction(apart, meta)
    assert small.work() == 0, small.log
    assert answers.column("y").to_numpy().tobytes() == small.answers().column("y").to_numpy().tobytes()

    spoil(large, row=2 * READ_ROWS + 32, value=1001.0, group_rows=num_rows)
    assert prediction.work() == ExitCode.TRAIN_STEP
    error = prediction.event("failed")["error"]
    assert f"rows {2 * READ_ROWS + 32} to {2 * READ_ROWS + 32} of row group 0" in error


def spoil(path: Path, *, row: int, value: float, group_rows: int = GROUP_ROWS) -> None:
    table = pq.read_table(path)
    x = table.column("x").combine_chunks().flatten().to_numpy().copy()
    x[4 * row] = value
    changed = pa.FixedSizeListArray.from_arrays(pa.array(x), 4)
    pq.write_table(table.set_column(0, "x", changed), path, row_group_size=group_rows)


def test_a_cancel_ends_it_at_once_and_whole_parts_stay(prediction: Prediction, meta: Path) -> None:
    prediction = Prediction(prediction.folder, meta, "serving:TakesItsTime")
    pid = prediction.start()
    deadline = time.monotonic() + DEADLINE_S
    while not (prediction.out.exists() and any(prediction.out.glob("a-*.parquet"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    assert prediction.wait(pid) == ExitCode.CANCELLED
    assert prediction.event("failed")["category"] == "cancelled"
    whole = [name for name in prediction.names() if name.startswith("a-")]
    assert whole
    prediction.spec["version"] = msgspec.to_builtins(version_of(meta, "serving:TakesItsTime"))
    assert prediction.work(HURRY="1") == 0, prediction.log
    assert prediction.event("completed")["parts_kept"] == len(whole)


def test_faults_of_the_input_are_named_all_at_once(prediction: Prediction, tmp_path: Path) -> None:
    pq.write_table(pa.table({"z": [1.0]}), tmp_path / "in" / "b.parquet")
    (tmp_path / "in" / "c.parquet").write_bytes(b"PAR1 and no more")
    prediction.spec["parquet_paths"] = ["in/*.parquet", "nowhere.parquet"]
    assert prediction.work() != 0
    failed = prediction.event("failed")
    assert failed["category"] == "input"
    assert "c.parquet" in failed["error"]
    assert "nowhere.parquet: no such file or folder" in failed["error"]
    (tmp_path / "in" / "c.parquet").unlink()
    prediction.spec["parquet_paths"] = ["in/*.parquet"]
    assert prediction.work() != 0
    assert "b.parquet: no column 'x'" in prediction.event("failed")["error"]


def test_a_model_that_cannot_be_loaded_fails_with_its_category(prediction: Prediction, meta: Path) -> None:
    prediction.spec["version"] = msgspec.to_builtins(version_of(meta, "serving:FailsToLoad"))
    assert prediction.work() != 0
    failed = prediction.event("failed")
    assert failed["category"] == "model-load"
    assert "the state does not fit" in failed["error"]
