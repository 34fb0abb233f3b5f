"""What is missing, cut short or too large for the disk is said before a run is submitted, with every fault at once."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.contract.sizes import show_bytes
from gen_worker.trainer.datasets.index import DatasetIndex
from trn.cli.submitting.dataset_check import find_dataset_faults
from trn.cli.submitting.disk_check import check_room, count_at_once
from trn.cli.submitting.job_file import Changes, read_job
from trn.cli.submitting.parquet_footer import read_columns
from trn.core.home import Home

MB = 1_000_000


def write_parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"x": [1, 2], "label": [0, 1]}), path)
    return path


def faults_of(folder: Path, *paths: str, **more: Any) -> list[str]:
    return list(find_dataset_faults({"dataset": {"parquet_paths": list(paths), **more}}, folder))


@pytest.mark.parametrize(
    "table",
    [
        {"x": [1]},
        {
            "a": [1],
            "b": [[1.0]],
            "s": [{"x": 1, "deep": {"y": [1], "z": 2}}],
            "naïve 名": ["x"],
            "last": [None],
        },
        {f"column_{number}": [number] for number in range(300)},
        {"d": pa.array([1], pa.decimal128(9, 2)), "t": pa.array([1], pa.timestamp("us", "UTC")), "m": [True]},
        {"m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "f": pa.array([b"ab"], pa.binary(2))},
    ],
)
def test_the_columns_of_a_footer_are_those_that_pyarrow_reads(tmp_path: Path, table: dict[str, Any]) -> None:
    path = write_parquet(tmp_path / "one.parquet", **table)
    assert read_columns(path) == pq.read_schema(path).names == list(table)


def test_what_is_no_footer_never_fails_otherwise_than_in_words(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet").read_bytes()
    path = tmp_path / "bent.parquet"
    for at in range(len(whole) - 12, len(whole) - 700, -7):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        read_columns(path)  # None or names, no exception


def test_missing_empty_and_cut_files_are_named_and_refs_are_left_to_the_worker(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "train.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    (tmp_path / "text.parquet").write_text("no parquet at all")
    (tmp_path / "empty").mkdir()
    told = faults_of(
        tmp_path, "train.parquet", "trian.parquet", "cut.parquet", "t*t.parquet", "empty", "no-*", "s3://b/x"
    )
    assert [fault.partition(": ")[0] for fault in told] == [
        f"dataset.parquet_paths[{number}]" for number in (1, 2, 3, 4, 5)
    ]
    assert told[0].endswith(f"there is no {tmp_path}/trian.parquet; did you mean {tmp_path}/train.parquet?")
    assert "cut.parquet: not a complete parquet file" in told[1]
    assert "it is cut short" in told[1]
    assert "it does not begin as one" in told[2]
    assert "holds no *.parquet file" in told[3]
    assert "no file matches" in told[4]


def test_what_the_worker_passes_over_in_a_folder_is_no_fault(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train.parquet")
    (tmp_path / "data" / "gone.parquet").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "data" / "pipe.parquet")
    assert faults_of(tmp_path, "data") == []


def test_validation_and_test_data_and_their_columns_are_looked_at_too(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "part-0.parquet")
    config = {
        "dataset": {"parquet_paths": ["data"], "columns": ["x", "labels"]},
        "validation": {"dataset": {"parquet_paths": ["gone"]}},
        "test": {"dataset": {"parquet_paths": ["data/part-0.parquet"], "columns": ["other"]}},
    }
    first, second, third = find_dataset_faults(config, tmp_path)
    assert "no column 'labels'; did you mean 'label'?" in first
    assert second.startswith("validation.dataset.parquet_paths[0]: there is no")
    assert third.startswith("test.dataset.parquet_paths[0]: ")
    assert third.endswith("no column 'other'; it has x, label")


def test_an_index_is_compared_by_name_and_size_and_the_remedy_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(3):
        write_parquet(data / f"part-{number}.parquet")
    DatasetIndex.build(data)
    write_parquet(data / "unlisted.parquet", other=[1])  # nobody reads it
    assert faults_of(tmp_path, "data", columns=["x"]) == []
    assert faults_of(tmp_path, "data/index.json", columns=["x"]) == []
    size_bytes = (data / "part-0.parquet").stat().st_size
    (data / "part-1.parquet").unlink()
    os.truncate(data / "part-2.parquet", 10)
    missing, changed, column = faults_of(tmp_path, "data", columns=["y"])
    assert f"part-1.parquet: found nothing, expected a file of {size_bytes:,} bytes" in missing
    assert f"part-2.parquet: found 10 bytes, expected {size_bytes:,}" in changed
    assert f"`trn dataset verify {data}`" in missing
    assert "no column 'y'; it has x, label" in column
    (data / "schema.json").write_text("{")
    (fault,) = faults_of(tmp_path, "data")
    assert "cannot be read" in fault
    (data / "schema.json").unlink()
    (fault,) = faults_of(tmp_path, "data")
    assert "schema.json cannot be read: No such file" in fault


def test_a_folder_with_thousands_of_lost_shards_is_told_in_a_few_lines(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shards = [{"path": f"{number}.parquet", "bytes": 1} for number in range(3000)]
    (data / "index.json").write_text(json.dumps({"shards": shards}))
    (data / "schema.json").write_text('{"columns": []}')
    told = faults_of(tmp_path, "data")
    assert len(told) == 6
    assert "2995 more shards" in told[-1]


def test_checkpoints_at_once_are_what_is_kept_and_the_one_being_written() -> None:
    assert count_at_once({"max_steps": 100, "checkpoint_every": 0}) == (1, 1)
    assert count_at_once({"max_steps": 100}) == (1, 1)
    assert count_at_once({"max_steps": 10_000}) == (4, 5)
    assert count_at_once({"epochs": 3}) == (1, 5)
    assert count_at_once({"epochs": 3, "max_steps": 10_000}) == (1, 5)  # the steps are only a limit then
    assert count_at_once({"max_steps": 1000, "checkpoint_every": 100, "checkpoints": {"keep_last": 0}}) == (
        10,
        10,
    )
    assert count_at_once({"max_steps": 1000, "checkpoint_every": 100, "checkpoints": {"keep_last": 1}}) == (
        2,
        3,
    )
    assert count_at_once({"max_steps": 1000, "checkpoint_every": 100}, from_step=900) == (1, 1)
    assert count_at_once({"max_steps": "many", "checkpoints": 3}) == (1, 1)  # judged elsewhere


def write_checkpoint(folder: Path, size_bytes: int, step: int = 500) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"step-{step:08}.pt").open("wb") as file:
        file.truncate(size_bytes)
    meta = folder / f"step-{step:08}.meta.json"
    files = [{"name": f"step-{step:08}.pt", "size_bytes": size_bytes, "hash": "sha256:0"}]
    fields = {"run_id": "old", "attempt": 1, "step": step, "epoch": 0, "final": False, "files": files}
    meta.write_text(json.dumps({"schema_version": "trainer_checkpoint.v1", **fields}))
    return meta


def test_a_resume_that_cannot_fit_is_refused_with_numbers_and_what_to_do(tmp_path: Path) -> None:
    meta = write_checkpoint(tmp_path / "old", 500 * MB)
    home = Home(tmp_path / "home")
    config = {"resume_checkpoint_path": str(meta), "max_steps": 100_000, "trainer": "a:B"}
    room = check_room(config, tmp_path, home, 1500 * MB)
    (fault,) = room.faults
    assert "needs 2 GB for 4 at once, each of 500 MB, as `resume_checkpoint_path` step-00000500" in fault
    assert "has 1.5 GB free: make room, keep fewer with `--set checkpoints.keep_last=1`" in fault
    assert check_room({**config, "max_steps": 600}, tmp_path, home, 700 * MB).faults == ()
    assert check_room(config, tmp_path, home, 20_000 * MB).warnings == ()
    (warning,) = check_room(config, tmp_path, home, 2600 * MB).warnings
    assert "tight" in warning


def test_an_earlier_run_of_the_trainer_tells_how_large_checkpoints_are(tmp_path: Path) -> None:
    home = Home(tmp_path)
    folder = home.run("model-12345678")
    write_checkpoint(folder.checkpoints, 500 * MB)
    old = {"trainer": "a:Model", "hyperparams": {"width": 3}, "max_steps": 1, "run_id": "model-12345678"}
    folder.job.write_text(json.dumps(old))
    job = {"trainer": "a:Model", "hyperparams": {"width": 3}, "max_steps": 5000, "checkpoint_every": 500}
    (fault,) = check_room(job, tmp_path, home, 800 * MB).faults
    assert "as run model-12345678 saved them" in fault
    other = {**job, "hyperparams": {"width": 1}}  # it may be smaller: not certain
    room = check_room(other, tmp_path, home, 800 * MB)
    assert (room.faults, len(room.warnings)) == ((), 1)
    equal = {name: value for name, value in old.items() if name != "run_id"}  # it is that run
    assert check_room(equal, tmp_path, home, 300 * MB).faults == ()
    assert check_room({**job, "trainer": "b:Model"}, tmp_path, home, 100 * MB).faults == ()
    assert check_room({"trainer": "a:Model"}, tmp_path, Home(tmp_path / "none"), 100 * MB).faults == ()


def test_a_disk_that_is_nearly_full_is_a_warning_for_the_run_waits(tmp_path: Path) -> None:
    (warning,) = check_room({"trainer": "a:B"}, tmp_path, Home(tmp_path), 20 * MB).warnings
    assert "has 20 MB free: nothing starts before 67.1 MB are" in warning


def test_every_fault_of_job_data_and_disk_is_told_at_once(tmp_path: Path) -> None:
    meta = write_checkpoint(tmp_path / "old", 8 << 40)  # sparse
    job = {
        "trainer": "mine:Mine",
        "max_steps": 10,
        "dataset": {"parquet_paths": ["gone.parquet"]},
        "resume_checkpoint_path": str(meta),
        "seed": -1,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    told = "\n".join(read_job(tmp_path / "job.json", Changes(), home=Home(tmp_path / "home")).faults)
    for part in ("seed", "gone.parquet", "checkpoints: the run needs room for one of"):
        assert part in told
    assert len(told.splitlines()) == 3


def test_sizes_are_said_in_three_digits() -> None:
    assert [show_bytes(size) for size in (0, 999, 1234, 5_600_000, 1 << 40)] == [
        "0 bytes",
        "999 bytes",
        "1.23 kB",
        "5.6 MB",
        "1.1 TB",
    ]
