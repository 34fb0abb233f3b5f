"""Labels that are inverted under a run, in files of the same size, rows and footer: no resume trains on both."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worker_process import Run, write_rows

from gen_worker.trainer import DatasetIndex


def write_labels(path: Path, *, flip: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = pa.array([(row % 2) ^ flip for row in range(120)], pa.int8())
    plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False, "compression": "none"}
    pq.write_table(pa.table({"label": labels}), path, row_group_size=10, **plain)


def start(tmp_path: Path, *, is_indexed: bool = False, **dataset: Any) -> Run:
    """A run that has trained one and a half epochs."""
    for number in range(2):
        write_labels(tmp_path / "data" / f"{number}.parquet")
    if is_indexed:
        DatasetIndex.build(tmp_path / "data")
    run = Run(
        tmp_path / "run",
        max_steps=9,
        checkpoint_every=3,
        dataset={"parquet_paths": [str(tmp_path / "data")], "batch_size": 40, "shuffle": True, **dataset},
    )
    done = run.work(HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    run.job["max_steps"] = 12
    return run


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("decode_cache", [False, True])
def test_a_resume_on_inverted_labels_is_refused_by_file(
    tmp_path: Path, *, is_indexed: bool, decode_cache: bool
) -> None:
    run = start(tmp_path, is_indexed=is_indexed, decode_cache=decode_cache)
    path = tmp_path / "data" / "1.parquet"
    kept = shutil.copy2(path, tmp_path / "kept.parquet")
    write_labels(path, flip=1)
    if is_indexed:
        DatasetIndex.build(tmp_path / "data")  # whoever meant the change does this
    refused = run.work(HOME=str(tmp_path))
    assert refused.returncode == 11, refused.stderr
    failed = run.events("failed")[-1]
    assert failed["category"] == "input"
    assert "1.parquet: row group 0 has changed since this run read it" in failed["error"]
    assert "0.parquet" not in failed["error"]

    shutil.copyfile(kept, path)
    if is_indexed:
        DatasetIndex.build(tmp_path / "data")
    done = run.work(HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = [event for event in run.events("log") if "row groups are unchanged" in event["message"]]
    assert [event["level"] for event in told] == ["info"]


def test_a_checkpoint_holds_the_checksums_of_all_that_was_read(tmp_path: Path) -> None:
    run = start(tmp_path)
    identity = json.loads((run.checkpoints / "final.meta.json").read_text())["identity"]
    assert identity["dataset_content"]["kind"].startswith("crc32:parquet:")
    assert all(len(file["stamp"]) == 3 for file in identity["dataset_manifest"]["files"])
    assert "content_read" not in json.loads((run.checkpoints / "final.meta.json").read_text())["cursor"]


def write_held_out(path: Path, *, sign: float = 1.0, num_rows: int = 40) -> None:
    x = np.ones((num_rows, 4), "float32")
    columns = {
        "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 4),
        "y": pa.array(sign * x[:, 0]),
    }
    pq.write_table(pa.table(columns), path, use_dictionary=False, write_statistics=False, compression="none")


def test_other_validation_data_is_taken_with_a_warning_that_names_it(tmp_path: Path) -> None:
    rows, held_out = write_rows(tmp_path / "rows.parquet"), tmp_path / "held_out.parquet"
    write_held_out(held_out)
    run = Run(
        tmp_path / "run",
        trainer="evaluating_mlp:EvaluatingMlp",
        max_steps=4,
        checkpoint_every=2,
        validate_every=2,
        dataset={"parquet_paths": [str(rows)], "batch_size": 8},
        validation={"dataset": {"parquet_paths": [str(held_out)], "batch_size": 8}},
    )

    def go_on(num_steps: int) -> list[str]:
        run.job["max_steps"] = num_steps
        num_before = len(run.events("log"))
        done = run.work()
        assert done.returncode == 0, done.stderr
        told = [event["message"] for event in run.events("log")[num_before:] if event["level"] == "warning"]
        return [message for message in told if "the job changed" not in message]

    assert go_on(4) == []
    assert go_on(6) == []
    write_held_out(held_out, sign=-1.0)
    (warning,) = go_on(8)
    assert warning.startswith(
        "the validation data changed since the checkpoint: its metrics cannot be compared"
    )
    assert "held_out.parquet: row group 0 has changed" in warning
    assert go_on(10) == []  # what was taken counts
    write_held_out(held_out, num_rows=48)
    (warning,) = go_on(12)
    assert "held_out.parquet: changed (was " in warning
