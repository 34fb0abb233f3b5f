"""A worker on a dataset folder with an index: it trains as on the bare files, and refuses what is not what it was."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from worker_process import Run, write_rows

from gen_worker.trainer import DatasetIndex


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        write_rows(tmp_path / "data" / f"part-{number}.parquet", num_rows=40, seed=number)
    DatasetIndex.build(tmp_path / "data")
    return tmp_path / "data"


def train(tmp_path: Path, *paths: Path, **dataset: Any) -> tuple[Run, str]:
    run = Run(
        tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}",
        trainer="dropout_mlp:DropoutMlp",
        max_steps=12,
        metric_every=1,
        dataset={"parquet_paths": [str(path) for path in paths], "batch_size": 8, "shuffle": True, **dataset},
    )
    done = run.work(HOME=str(tmp_path))
    return run, done.stderr if done.returncode else ""


def test_an_indexed_folder_gives_the_rows_of_its_files(tmp_path: Path, folder: Path) -> None:
    bare, fault = train(tmp_path, *sorted(folder.glob("*.parquet")))
    assert not fault
    indexed, fault = train(tmp_path, folder)
    assert not fault
    by_file, fault = train(tmp_path, folder / "index.json")
    assert not fault
    assert bare.losses() == indexed.losses() == by_file.losses()


def test_a_shard_that_changed_is_refused_by_name_before_the_first_step(tmp_path: Path, folder: Path) -> None:
    write_rows(folder / "part-1.parquet", num_rows=40, seed=99)
    (folder / "part-2.parquet").unlink()
    run, fault = train(tmp_path, folder)
    assert "input" in fault
    assert "part-1.parquet" in fault
    assert "part-2.parquet" in fault
    assert "part-0.parquet" not in fault
    assert run.losses() == {}


def test_a_schema_that_does_not_fit_the_columns_is_refused_with_their_names(
    tmp_path: Path, folder: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    pq.write_table(pa.table({"x": [1.0, 2.0], "label": ["a", "b"]}), other / "part.parquet")
    DatasetIndex.build(other)
    # An index and a schema that agree with each other, and with nothing else.
    schema = json.loads((folder / "schema.json").read_text())
    (other / "schema.json").write_text(json.dumps(schema))
    index = json.loads((other / "index.json").read_text())
    index["schema_digest"] = json.loads((folder / "index.json").read_text())["schema_digest"]
    (other / "index.json").write_text(json.dumps(index))
    run, fault = train(tmp_path, other)
    assert "x" in fault
    assert "y" in fault
    assert "float" in fault
    assert run.losses() == {}
