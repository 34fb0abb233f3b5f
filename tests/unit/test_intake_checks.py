"""Data that is missing or incomplete, and checkpoints that are too large for the disk, are found before a run is queued."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.contract.sizes import show_bytes
from gen_worker.errors import Fault
from gen_worker.launcher.import_check import find_footer_faults, find_import_faults
from gen_worker.trainer.datasets.index import DatasetIndex
from trn.core.home import Home
from trn.daemon.intake import disk_check
from trn.daemon.intake.data_check import find_data_faults
from trn.daemon.intake.disk_check import Room, count_at_once

MB = 1_000_000


def write_parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"x": [1, 2], "label": [0, 1]}), path)
    return path


def faults_of(folder: Path, *paths: str, **more: Any) -> list[Fault]:
    return list(find_data_faults({"dataset": {"parquet_paths": list(paths), **more}}, str(folder)))


def footer_faults(folder: Path, *paths: str, columns: list[str] | None = None) -> list[Fault]:
    return list(find_footer_faults("dataset", paths, columns, folder))


def test_a_fault_is_its_sentence_and_keeps_its_data_through_json() -> None:
    fault = Fault.of_value("dataset.batch_size", '"many"', "a whole number", " (without quotes)")
    assert fault == 'dataset.batch_size: found "many", expected a whole number (without quotes)'
    again = Fault.from_data({**json.loads(json.dumps(fault.to_data())), "of_a_newer_release": "x"})
    assert (again, again.to_data()) == (fault, fault.to_data())
    assert (again.path, again.kind, again.found) == ("dataset.batch_size", "value", '"many"')
    assert (again.expected, again.hint) == ("a whole number", "without quotes")
    assert Fault.of("plain").to_data() == {"text": "plain"}


def test_predictions_are_not_written_where_they_would_be_read_as_rows(tmp_path: Path) -> None:
    for name in ("days/a.parquet", "days/more/b.parquet"):
        write_parquet(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "days")

    def faults(path: str, out: str) -> list[str]:
        job = {"prediction": {"parquet_paths": [path], "out": out}}
        return [fault.path for fault in find_data_faults(job, str(tmp_path))]

    refused = (
        ("days", "days"),
        ("days", "days/more/out"),
        ("days", "link"),
        ("link", "days/out"),
        ("days/*.parquet", "days"),
        ("link/*.parquet", "days"),
        ("days/**/*.parquet", "days/more/out"),
        ("*/a*", "days"),
        (".", "out"),
    )
    for path, out in refused:
        assert faults(path, out) == ["prediction.out"], (path, out)
    accepted = (
        ("days", "out"),
        ("days", "days/_out"),
        ("days/a.parquet", "days"),
        ("days/*.parquet", "days/out"),
        ("days/?.parquet", "days"),
        ("days/more", "days"),
    )
    for path, out in accepted:
        assert faults(path, out) == [], (path, out)


def test_missing_and_empty_paths_are_named_and_remote_ones_are_left_to_the_worker(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet")
    (tmp_path / "empty").mkdir()
    found = faults_of(tmp_path, "train.parquet", "trian.parquet", "t*t.parquet", "empty", "s3://b/x")
    assert [(fault.path, fault.kind) for fault in found] == [
        (f"dataset.parquet_paths[{number}]", "data") for number in (1, 2, 3)
    ]
    assert found[0].endswith(f"no such file or folder: did you mean {tmp_path}/train.parquet?")
    assert "the pattern matches no file" in found[1]
    assert "the folder has no *.parquet file" in found[2]
    assert list(find_data_faults({"dataset": {"parquet_paths": ["x"]}}, "")) == [], (
        "relative to nothing known"
    )


def test_weights_and_checkpoints_that_are_not_there_are_named(tmp_path: Path) -> None:
    config = {"weights": "none.pt", "resume_checkpoint_path": "."}
    weights, checkpoint = find_data_faults(config, str(tmp_path))
    assert weights == f"weights: there is no {tmp_path / 'none.pt'}"
    assert checkpoint.startswith(f"resume_checkpoint_path: {tmp_path} is a folder, expected the .meta.json")
    assert (weights.kind, checkpoint.path) == ("file", "resume_checkpoint_path")


def test_footers_are_read_by_the_workers_own_reader(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "train.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    (tmp_path / "text.parquet").write_text("no parquet at all")
    cut, text = footer_faults(tmp_path, "train.parquet", "cut.parquet", "text.parquet", "gone", "s3://b/x")
    assert (cut.path, text.path) == ("dataset.parquet_paths[1]", "dataset.parquet_paths[2]")
    assert "truncated" in cut
    assert "no parquet header" in text
    (near,) = footer_faults(tmp_path, "train.parquet", columns=["x", "labels"])
    assert "no column 'labels': did you mean 'label'?" in near
    (far,) = footer_faults(tmp_path, "train.parquet", columns=["other"])
    assert far.endswith("no column 'other': it has x, label")


def test_a_prediction_may_copy_no_columns_and_those_that_it_copies_have_to_be_there(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "rows.parquet")

    def faults(**fields: Any) -> list[Fault]:
        section = {"checkpoint": "final.meta.json", "parquet_paths": [str(data)], "out": "out", **fields}
        return find_import_faults({"run_id": "p", "mode": "inference", "prediction": section})

    assert faults() == faults(columns=["x"]) == []
    (missing,) = faults(columns=["labels"])
    assert "no column 'labels': did you mean 'label'?" in missing
    assert missing.path == "prediction.parquet_paths[0]"


def test_what_the_worker_refuses_in_a_folder_is_a_fault_here_too(tmp_path: Path) -> None:
    """Data that is linked and not fetched yet, say: a run without its rows would not say so."""
    write_parquet(tmp_path / "data" / "train.parquet")
    (tmp_path / "data" / "gone.parquet").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "data" / "pipe.parquet")
    link, pipe = sorted(faults_of(tmp_path, "data"))
    assert "gone.parquet: it is a link whose target is gone" in link
    assert "pipe.parquet: it is no regular file" in pipe


def test_validation_and_test_data_are_looked_at_too(tmp_path: Path) -> None:
    config = {
        "validation": {"dataset": {"parquet_paths": ["gone"]}},
        "test": {"dataset": {"parquet_paths": [str(tmp_path / "away")]}},
    }
    found = find_data_faults(config, str(tmp_path))
    assert [fault.path for fault in found] == [
        "validation.dataset.parquet_paths[0]",
        "test.dataset.parquet_paths[0]",
    ]


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
    assert "no column 'y': it has x, label" in column
    (data / "schema.json").write_text("{")
    (fault,) = faults_of(tmp_path, "data")
    assert "schema.json" in fault
    (data / "schema.json").unlink()
    (fault,) = faults_of(tmp_path, "data")
    assert "schema.json: no such file" in fault
    assert f"`trn dataset index {data}`" in fault


def test_a_folder_with_many_lost_shards_is_reported_in_a_few_lines(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for number in range(20):
        write_parquet(data / f"part-{number:02}.parquet")
    DatasetIndex.build(data)
    for path in data.glob("*.parquet"):
        path.unlink()
    found = faults_of(tmp_path, "data")
    assert len(found) == 6
    assert "15 more shards" in found[-1]


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


def check_room(config: dict[str, Any], base_dir: Path, home: Home, free_bytes: int) -> Room:
    return disk_check.check_room(config, base_dir, home, min_free_bytes=1 << 26, free_bytes=free_bytes)


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
    assert check_room({**job, "trainer": "b:Model"}, tmp_path, home, 100 * MB).faults == ()
    assert check_room({"trainer": "a:Model"}, tmp_path, Home(tmp_path / "none"), 100 * MB).faults == ()


def test_a_disk_that_is_nearly_full_is_a_warning_for_the_run_waits(tmp_path: Path) -> None:
    (warning,) = check_room({"trainer": "a:B"}, tmp_path, Home(tmp_path), 20 * MB).warnings
    assert "has 20 MB free: nothing starts before 67.1 MB are" in warning


def test_sizes_are_said_in_three_digits() -> None:
    assert [show_bytes(size) for size in (0, 999, 1234, 5_600_000, 1 << 40)] == [
        "0 bytes",
        "999 bytes",
        "1.23 kB",
        "5.6 MB",
        "1.1 TB",
    ]
