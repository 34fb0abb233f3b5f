"""Equal digests, equal bytes: no change of what a job trains on is missed, and nothing is read without need."""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.trainer.datasets import job_content
from gen_worker.trainer.datasets.index import DatasetIndex
from gen_worker.trainer.datasets.job_content import ContentReader, find_changed_hyperparams, names_files


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"id": pa.array([value] * 50, pa.int64())}), path, use_dictionary=False, compression="none"
    )
    return path


def age(*paths: Path) -> None:
    """As if they had been written long ago, as far as anyone can pretend that."""
    for path in paths:
        os.utime(path, ns=(1, 1))


def job(*paths: str, **more: Any) -> dict[str, Any]:
    return {"dataset": {"parquet_paths": list(paths)}, **more}


def digest(config: dict[str, Any], base: Path, **options: int) -> str:
    return ContentReader(**options).read(config, str(base)).digest


@pytest.mark.parametrize("whole_bytes", [job_content.WHOLE_BYTES, 0])
@pytest.mark.parametrize("paths", [["a.parquet"], ["."], ["*.parquet"], ["a.parquet", "b"]])
def test_other_rows_below_the_same_paths_are_other_data(
    tmp_path: Path, paths: list[str], whole_bytes: int
) -> None:
    write(tmp_path / "a.parquet", 1)
    write(tmp_path / "b" / "b.parquet", 2)
    config = job(*paths)
    before = digest(config, tmp_path, whole_bytes=whole_bytes)
    assert before == digest(config, tmp_path, whole_bytes=whole_bytes)
    write(tmp_path / "a.parquet", 7)
    assert digest(config, tmp_path, whole_bytes=whole_bytes) != before


def test_a_file_more_or_less_or_in_another_order_is_other_data(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.parquet", 1)
    seen = [digest(job("data"), tmp_path)]
    write(tmp_path / "data" / "b.parquet", 2)
    seen.append(digest(job("data"), tmp_path))
    (tmp_path / "data" / "a.parquet").rename(tmp_path / "data" / "c.parquet")
    seen.append(digest(job("data"), tmp_path))
    (tmp_path / "data" / "c.parquet").unlink()
    seen.append(digest(job("data"), tmp_path))
    assert len(set(seen)) == 4
    (tmp_path / "data" / "b.parquet").unlink()
    assert digest(job("data"), tmp_path) == digest(job("data"), tmp_path) not in seen


def test_a_moved_folder_with_the_same_bytes_is_the_same_data(tmp_path: Path) -> None:
    write(tmp_path / "one" / "data" / "a.parquet", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert digest(job("data"), tmp_path / "one") == digest(job("data"), tmp_path / "two")


@pytest.mark.parametrize("names", [("validation", "dataset"), ("test", "dataset")])
def test_held_out_data_counts_too(tmp_path: Path, names: tuple[str, str]) -> None:
    path = write(tmp_path / "held.parquet", 1)
    config = {"mock_batches": [1], names[0]: {names[1]: {"parquet_paths": ["held.parquet"]}}}
    before = digest(config, tmp_path)
    write(path, 2)
    assert digest(config, tmp_path) != before


@pytest.mark.parametrize(
    "config",
    [
        {"weights": "model.pt"},
        {"resume_checkpoint_path": "model.pt"},
        {"inputs": {"base_model_ref": "file:model.pt"}},
        {"inputs": {"base_model_ref": "models"}},
        {"dataset": {"source": "mine:Data", "args": {"root": "models"}}},
        {"dataset": {"source": "mine:Data", "args": {"files": ["model.pt"]}}},
    ],
)
def test_weights_refs_and_what_a_source_is_given_count_too(tmp_path: Path, config: dict[str, Any]) -> None:
    for path in (tmp_path / "model.pt", tmp_path / "models" / "deep" / "model.pt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"old")
    before = digest(config, tmp_path)
    for path in (tmp_path / "model.pt", tmp_path / "models" / "deep" / "model.pt"):
        path.write_bytes(b"new")
    assert digest(config, tmp_path) != before


def test_what_lies_elsewhere_is_compared_by_name_and_that_is_said_without_secrets(tmp_path: Path) -> None:
    config = {
        "inputs": {"dataset_parquet_refs": ["s3://bucket/a.parquet", "https://user:secret@host/b.parquet"]},
        "dataset": {"source": "mine:Data"},
    }
    found = ContentReader().read(config, str(tmp_path))
    assert found.by_name == (
        "dataset.source mine:Data",
        "s3://bucket/a.parquet",
        "https://***@host/b.parquet",
    )
    assert found.digest != digest({"inputs": {"dataset_parquet_refs": ["s3://bucket/c.parquet"]}}, tmp_path)
    pinned = {"inputs": {"base_model_ref": f"https://host/m.pt#sha256={'0' * 64}"}}
    assert ContentReader().read(pinned, str(tmp_path)).by_name == ()


def test_a_shard_has_the_hash_of_its_index_while_the_index_is_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    shard = write(folder / "a.parquet", 1)
    plain = digest(job("data"), tmp_path)
    DatasetIndex.build(folder)
    read: list[str] = []
    hash_whole = ContentReader.hash_whole

    def spy(self: ContentReader, path: str) -> str:
        read.append(path)
        return hash_whole(self, path)

    monkeypatch.setattr(ContentReader, "hash_whole", spy)
    assert digest(job("data"), tmp_path) == digest(job("data/index.json"), tmp_path) == plain
    assert read == []
    size_bytes = shard.stat().st_size
    other = write(tmp_path / "other.parquet", 2)
    age(other)
    shutil.copy2(other, shard)  # the same size, an old time: only its change time tells
    assert shard.stat().st_size == size_bytes
    assert digest(job("data"), tmp_path) != plain
    assert read == [str(shard)]


def test_a_file_is_hashed_once_while_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", 1)
    later = time.time_ns() + 10 * job_content.SETTLE_NS
    monkeypatch.setattr(time, "time_ns", lambda: later)
    reader = ContentReader()
    before = reader.read(job("a.parquet"), str(tmp_path))
    hashed: list[object] = []
    monkeypatch.setattr(job_content.hashlib, "file_digest", lambda stream, _name: hashed.append(stream))
    assert reader.read(job("a.parquet"), str(tmp_path)) == before
    assert hashed == []
    write(path, 2)
    with pytest.raises(AttributeError):  # it is hashed again
        reader.read(job("a.parquet"), str(tmp_path))


def test_what_is_missing_or_cannot_be_read_is_no_error_and_not_equal_to_what_is_there(tmp_path: Path) -> None:
    config = job("a.parquet", "nothing-*.parquet", weights="gone.pt")
    before = digest(config, tmp_path)
    assert before.startswith("sha256:")
    (tmp_path / "gone.pt").write_bytes(b"")
    assert digest(config, tmp_path) != before
    assert digest(job("relative.parquet"), Path()) == digest(job("relative.parquet"), Path())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").write_text("no index")
    assert digest(job("data"), tmp_path).startswith("sha256:")


def test_a_job_without_data_is_not_looked_at(tmp_path: Path) -> None:
    config = {"mock_batches": [1], "hyperparams": {"witness": "w.txt", "lr": 0.1}}
    assert not names_files(config)
    assert ContentReader().read(config, str(tmp_path)).digest == ""
    assert names_files(job("a.parquet"))
    assert names_files({"weights": "m.pt"})


def test_a_file_of_the_hyperparams_that_changed_since_is_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    config = {"hyperparams": {"deep": [{"vocab": "vocab.txt"}], "optimizer": "adam", "missing": "x.txt"}}
    assert find_changed_hyperparams(config, str(tmp_path), since_ms=0) == ["vocab.txt"]
    assert find_changed_hyperparams(config, str(tmp_path), since_ms=(1 << 42)) == []


def test_a_large_folder_is_compared_as_far_as_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_content, "MAX_FILES", 2)
    for number in range(4):
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "images" / f"{number}.png").write_bytes(b"x")
    config = {"dataset": {"source": "a:b", "args": {"root": "images"}}}
    found = ContentReader().read(config, str(tmp_path))
    assert found.by_name[1] == f"{tmp_path}/images: 2 of its 4 files"
    (tmp_path / "images" / "1.png").write_bytes(b"y")
    assert ContentReader().read(config, str(tmp_path)).digest != found.digest


def test_neither_pyarrow_nor_torch_is_loaded_for_it(tmp_path: Path) -> None:
    import subprocess

    write(tmp_path / "data" / "a.parquet")
    DatasetIndex.build(tmp_path / "data")
    code = (
        "import sys; from gen_worker.trainer.datasets.job_content import ContentReader\n"
        "found = ContentReader().read({'dataset': {'parquet_paths': ['data']}, 'weights': 'w'}, sys.argv[1])\n"
        "assert found.digest and not {'pyarrow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
