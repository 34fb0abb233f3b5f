"""Every fault of a dataset is found from its footers, all at once, each with its file."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gen_worker.errors import InputError
from gen_worker.trainer.feed.manifest import Manifest, read_manifest


def write(path: Path, num: int = 10, **columns: pa.Array) -> Path:
    table = pa.table(columns or {"id": pa.array(range(num)), "label": pa.array([0] * num)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=4)
    return path


def test_a_folder_is_read_recursively_sorted_and_without_hidden_files(tmp_path):
    for name in ("b/2.parquet", "a.parquet", "b/1.parquet", "_tmp/x.parquet", ".hidden.parquet", "notes.txt"):
        write(tmp_path / name)
    manifest = read_manifest([str(tmp_path)])
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in manifest.files] == [
        "a.parquet",
        "b/1.parquet",
        "b/2.parquet",
    ]
    assert manifest.group_rows == (4, 4, 2) * 3
    assert manifest.num_rows == 30


def test_all_faults_of_all_files_come_in_one_error(tmp_path):
    good = write(tmp_path / "good.parquet")
    write(tmp_path / "other.parquet", id=pa.array(["x"]), label=pa.array([1]))
    write(tmp_path / "fewer.parquet", id=pa.array([1]))
    cut = write(tmp_path / "cut.parquet")
    cut.write_bytes(cut.read_bytes()[:-20])
    (tmp_path / "text.parquet").write_text("not parquet at all")
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "hollow").mkdir()
    with pytest.raises(InputError) as caught:
        read_manifest(
            [
                str(tmp_path / "*.parquet"),
                str(tmp_path / "missing.parquet"),
                str(tmp_path / "god.parquet"),
                str(tmp_path / "hollow"),
                str(tmp_path / "none-*.parquet"),
                str(good),
            ],
            ["id", "label"],
        )
    text = str(caught.value)
    assert text.startswith("dataset: 9 faults")
    for message in (
        "missing.parquet: no such file or folder",
        f"god.parquet: no such file or folder: did you mean {good}?",
        "hollow: the folder has no *.parquet file",
        "none-*.parquet: the pattern matches no file",
        "cut.parquet: not a complete parquet file",
        "truncated",
        "text.parquet: not a complete parquet file (18 bytes): no parquet header",
        "empty.parquet: not a complete parquet file (0 bytes)",
        "fewer.parquet: no column 'label': it has id",
        "other.parquet: column 'id' is string, but int64 in",
    ):
        assert message in text, message


def test_what_has_the_name_of_a_file_and_is_none_is_a_fault(tmp_path):
    """Its rows would be missing without a word."""
    write(tmp_path / "data" / "a.parquet")
    (tmp_path / "data" / "b.parquet").symlink_to(tmp_path / "gone.parquet")
    os.mkfifo(tmp_path / "data" / "c.parquet")
    (tmp_path / "data" / "d.parquet").symlink_to(tmp_path / "data" / "a.parquet")
    (tmp_path / "data" / "e.parquet").mkdir()
    for path in (tmp_path / "data", tmp_path / "data" / "*.parquet", tmp_path / "data" / "c.parquet"):
        with pytest.raises(InputError) as caught:
            read_manifest([str(path)])
        text = str(caught.value)
        assert "c.parquet: it is no regular file, expected a parquet file" in text
        assert ("b.parquet: it is a link whose target is gone" in text) == (path.name != "c.parquet")
    (tmp_path / "data" / "b.parquet").unlink()
    (tmp_path / "data" / "c.parquet").unlink()
    assert len(read_manifest([str(tmp_path / "data")]).files) == 2


def test_a_misspelt_column_names_the_nearest(tmp_path):
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="no column 'lable': did you mean 'label'"):
        read_manifest([str(tmp_path)], ["lable"])


def test_a_corrupt_footer_is_found(tmp_path):
    path = write(tmp_path / "a.parquet")
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[-8:-4], "little")
    content[-8 - length : -8] = os.urandom(length)
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read as parquet"):
        read_manifest([str(path)])
    content[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet: corrupt footer"):
        read_manifest([str(path)])


def test_a_file_that_lost_bytes_in_the_middle_is_found(tmp_path):
    path = write(tmp_path / "a.parquet", num=1000)
    content = path.read_bytes()
    path.write_bytes(content[:100] + content[600:])
    with pytest.raises(InputError, match="its row groups end at byte"):
        read_manifest([str(path)])


def test_a_dataset_without_rows_is_refused_but_an_empty_part_is_not(tmp_path):
    write(tmp_path / "a.parquet", num=0)
    with pytest.raises(InputError, match="has no rows"):
        read_manifest([str(tmp_path)])
    write(tmp_path / "b.parquet", id=pa.array([], pa.int64()), label=pa.array([], pa.int64()))
    write(tmp_path / "c.parquet")
    (tmp_path / "a.parquet").unlink()
    assert read_manifest([str(tmp_path)]).num_rows == 10


def test_no_paths_and_no_columns_are_refused(tmp_path):
    with pytest.raises(InputError, match="no files were given"):
        read_manifest([])
    write(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="list of columns is empty"):
        read_manifest([str(tmp_path)], [])
    with pytest.raises(InputError, match="'id' is listed more than once"):
        read_manifest([str(tmp_path)], ["id", "id"])


def test_columns_may_be_in_another_order_in_another_file_but_not_more(tmp_path):
    write(tmp_path / "a.parquet", id=pa.array([1]), label=pa.array([2]))
    write(tmp_path / "b.parquet", label=pa.array([2]), id=pa.array([1]))
    assert read_manifest([str(tmp_path)]).schema.names == ["id", "label"]
    write(tmp_path / "c.parquet", label=pa.array([2]), id=pa.array([1]), more=pa.array([1]))
    with pytest.raises(InputError, match=r"c\.parquet: column 'more' is not in"):
        read_manifest([str(tmp_path)])
    assert read_manifest([str(tmp_path)], ["label"]).num_rows == 3


def test_the_digest_changes_with_content_name_order_and_columns_but_not_with_the_folder(tmp_path):
    a = write(tmp_path / "one" / "a.parquet")
    b = write(tmp_path / "one" / "b.parquet", num=7)
    base = read_manifest([str(a), str(b)]).digest
    moved = tmp_path / "two"
    moved.mkdir()
    for file in (a, b):
        (moved / file.name).write_bytes(file.read_bytes())
    assert read_manifest([str(moved)]).digest == base
    others = {
        base,
        read_manifest([str(b), str(a)]).digest,
        read_manifest([str(a)]).digest,
        read_manifest([str(a), str(b)], ["id"]).digest,
        read_manifest([str(a), str(b)], ["label", "id"]).digest,
    }
    (moved / "b.parquet").rename(moved / "c.parquet")
    others.add(read_manifest([str(moved)]).digest)
    assert len(others) == 6


def test_a_file_rewritten_with_other_values_at_equal_size_changes_the_digest(tmp_path):
    path = write(tmp_path / "a.parquet", id=pa.array([1, 2, 3]))
    size, base = path.stat().st_size, read_manifest([str(path)]).digest
    write(path, id=pa.array([1, 2, 4]))
    assert path.stat().st_size == size
    assert read_manifest([str(path)]).digest != base


def test_a_manifest_survives_json_and_names_what_changed(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.parquet")
    saved = Manifest.from_json(read_manifest([str(tmp_path)]).to_json())
    assert saved.digest == read_manifest([str(tmp_path)]).digest
    (tmp_path / "a.parquet").unlink()
    write(tmp_path / "b.parquet", num=11)
    write(tmp_path / "d.parquet")
    lines = read_manifest([str(tmp_path)], ["id"]).changes_since(saved)
    assert lines[0].endswith("a.parquet: is gone")
    assert "b.parquet: changed (was" in lines[1]
    assert lines[2].endswith("d.parquet: is new")
    assert lines[3] == "the columns were id: int64, label: int64, are now id: int64"
    assert len(lines) == 4


def test_a_manifest_of_an_unknown_version_is_refused(tmp_path):
    write(tmp_path / "a.parquet")
    document = read_manifest([str(tmp_path)]).to_json().replace(b'"version":1', b'"version":2')
    with pytest.raises(InputError, match="version 2 is unknown"):
        Manifest.from_json(document)
