"""A dataset folder says what it holds: every shard, every column, every fault; and a crash never makes it lie."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_worker.contract import failpoints
from gen_worker.errors import InputError, SpecError
from gen_worker.trainer.datasets import index as dataset_index
from gen_worker.trainer.datasets.index import DatasetIndex, ShardRecord, resolve_dataset_paths
from gen_worker.trainer.datasets.schema import DatasetSchema, check_schema
from gen_worker.trainer.feed.manifest import read_manifest


def write(path: Path, num: int = 10, start: int = 0, **columns: pa.Array) -> Path:
    ids = range(start, start + num)
    table = pa.table(columns or {"id": pa.array(ids), "label": pa.array([i % 3 for i in ids], pa.int32())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=4)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards in an order that is not the order in which they were written."""
    for number, name in enumerate(("b/2.parquet", "a.parquet", "b/1.parquet")):
        write(tmp_path / "data" / name, num=4 + number, start=100 * number)
    return tmp_path / "data"


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- building and reading back


def test_an_index_lists_every_shard_sorted_with_what_identifies_it(folder):
    for name in ("_tmp/x.parquet", ".hidden.parquet", ".cache/y.parquet"):
        write(folder / name)
    (folder / "notes.txt").write_text("no shard")
    index = DatasetIndex.build(folder)
    assert [(shard.path, shard.rows) for shard in index.shards] == [
        ("a.parquet", 5),
        ("b/1.parquet", 6),
        ("b/2.parquet", 4),
    ]
    for shard in index.shards:
        content = (folder / shard.path).read_bytes()
        assert shard.size_bytes == len(content)
        assert shard.hash == "sha256:" + hashlib.sha256(content).hexdigest()
    assert (index.rows, index.size_bytes) == (15, sum(shard.size_bytes for shard in index.shards))
    assert DatasetIndex.read(folder) == DatasetIndex.read(folder / "index.json") == index
    document = json.loads((folder / "index.json").read_text())
    assert document["schema_version"] == "dataset_index.v1"
    assert sorted(document["shards"][0]) == ["bytes", "hash", "path", "rows"]
    assert not [path for path in folder.iterdir() if ".tmp" in path.name]


def test_the_digest_is_of_the_data_not_of_the_time_or_the_place(folder, tmp_path):
    index = DatasetIndex.build(folder)
    shutil.copytree(folder, tmp_path / "moved")
    again = DatasetIndex.build(tmp_path / "moved")
    assert msgspec.structs.replace(index, created_ms=1).digest == again.digest == index.digest
    write(tmp_path / "moved" / "a.parquet", num=5, start=7)
    assert DatasetIndex.build(tmp_path / "moved").digest != index.digest


@given(
    shards=st.lists(
        st.builds(
            ShardRecord,
            path=st.from_regex(r"[a-z]{1,3}(/[a-z.]{3}){0,2}x", fullmatch=True),
            rows=st.integers(0, 2**40),
            size_bytes=st.integers(1, 2**40),
            hash=st.binary(min_size=32, max_size=32).map(lambda b: "sha256:" + b.hex()),
        ),
        min_size=1,
        max_size=5,
        unique_by=lambda shard: shard.path,
    ),
    data=st.data(),
)
def test_any_change_of_any_fact_changes_the_digest_and_the_document_keeps_all(shards, data):
    index = DatasetIndex(
        schema_version="dataset_index.v1",
        created_ms=0,
        schema_digest="sha256:" + "0" * 64,
        rows=sum(shard.rows for shard in shards),
        size_bytes=sum(shard.size_bytes for shard in shards),
        shards=shards,
    )
    assert dataset_index._decode_own(index.to_json()) == index
    at = data.draw(st.integers(0, len(shards) - 1))
    name, value = data.draw(
        st.sampled_from(
            [("path", "other"), ("rows", 2**41), ("size_bytes", 2**41), ("hash", "sha256:" + "e" * 64)]
        )
    )
    changed = [*shards]
    changed[at] = msgspec.structs.replace(shards[at], **{name: value})
    assert msgspec.structs.replace(index, shards=changed).digest != index.digest
    if len(shards) > 1:
        assert msgspec.structs.replace(index, shards=shards[::-1]).digest != index.digest


def test_indexing_a_folder_does_not_change_the_order_of_its_data(folder):
    plain = read_manifest([str(folder)])
    DatasetIndex.build(folder)
    resolved = resolve_dataset_paths([str(folder)])
    assert read_manifest(resolved.parquet_paths).digest == plain.digest


def test_progress_reaches_the_total_and_may_give_up_without_a_thread_left(folder):
    calls: list[tuple[str, int, int]] = []
    index = DatasetIndex.build(folder, workers=3, on_progress=lambda *call: calls.append(call))
    assert {name for name, _, _ in calls} == {shard.path for shard in index.shards}
    assert calls[-1][1:] == (index.size_bytes, index.size_bytes)

    def give_up(*_call: object) -> None:
        raise KeyboardInterrupt

    (folder / "index.json").unlink()
    with pytest.raises(KeyboardInterrupt):
        DatasetIndex.build(folder, on_progress=give_up)
    assert not (folder / "index.json").exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


# --- what is refused


def test_all_faults_of_all_shards_come_in_one_error_and_nothing_is_written(folder, tmp_path):
    before = DatasetIndex.build(folder)
    write(folder / "other.parquet", id=pa.array(["x"]), label=pa.array([1], pa.int32()))
    write(folder / "fewer.parquet", id=pa.array([1]))
    write(folder / "more.parquet", id=pa.array([1]), label=pa.array([1], pa.int32()), tail=pa.array([1]))
    cut = write(folder / "cut.parquet")
    cut.write_bytes(cut.read_bytes()[:-20])
    (folder / "out.parquet").symlink_to(write(tmp_path / "elsewhere.parquet"))
    (folder / "nothing.parquet").symlink_to(folder / "gone")
    (tmp_path / "store").mkdir()
    (folder / "linked").symlink_to(tmp_path / "store")
    (folder / os.fsdecode(b"\xff.parquet")).write_bytes(b"")
    with pytest.raises(InputError) as caught:
        DatasetIndex.build(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder}: 8 faults\n")
    for message in (
        "other.parquet: column 'id' is string, but int64 in",
        "fewer.parquet: no column 'label'",
        "more.parquet: column 'tail' is not in",
        "cut.parquet: not a complete parquet file",
        "out.parquet: a link out of the folder",
        "nothing.parquet: cannot be read: No such file",
        "linked: a link out of the folder",
        "the name is not UTF-8",
        "nothing was indexed",
    ):
        assert message in text, message
    assert DatasetIndex.read(folder) == before


def test_a_link_that_stays_inside_is_no_fault_and_a_linked_folder_is_not_read_twice(folder):
    (folder / "latest").symlink_to("b")
    (folder / "again.parquet").symlink_to("a.parquet")
    index = DatasetIndex.build(folder)
    assert [shard.path for shard in index.shards] == [
        "a.parquet",
        "again.parquet",
        "b/1.parquet",
        "b/2.parquet",
    ]
    assert index.shard_paths(folder)[1] == folder / "again.parquet"


def test_a_folder_without_shards_or_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no \*\.parquet file"):
        DatasetIndex.build(tmp_path)
    with pytest.raises(InputError, match="none: cannot be read: No such file or directory"):
        DatasetIndex.build(tmp_path / "none")


def test_a_shard_that_changes_while_it_is_indexed_is_refused(folder, monkeypatch):
    real = dataset_index.hash_shard

    def rewrite_first(path, is_stopped):
        if path.name == "1.parquet":
            os.utime(path, ns=(1, 1))
        return real(path, is_stopped)

    monkeypatch.setattr(dataset_index, "hash_shard", rewrite_first)
    with pytest.raises(InputError, match=r"1\.parquet: changed while the folder was indexed"):
        DatasetIndex.build(folder)
    assert not (folder / "index.json").exists()


def test_files_of_other_programs_are_not_overwritten(folder):
    for content in ('{"weight_map": {}}', "[1, 2]"):
        (folder / "index.json").write_text(content)
        with pytest.raises(InputError, match="file of another program"):
            DatasetIndex.build(folder)
    (folder / "index.json").unlink()
    (folder / "schema.json").write_text('{"type": "object"}')
    with pytest.raises(SpecError, match="schema_version: missing"):
        DatasetIndex.build(folder)
    assert (folder / "schema.json").read_text() == '{"type": "object"}'


def test_all_faults_of_an_index_come_in_one_error(folder):
    DatasetIndex.build(folder)
    good = json.loads((folder / "index.json").read_text())
    shard = good["shards"][0]
    rewrite(
        folder / "index.json",
        rows=99,
        bytes="many",
        colour=1,
        shards=[
            shard,
            {**shard, "hash": "md5:1"},
            {**shard, "path": "../x.parquet", "rows": 1.0},
            {"path": "/abs.parquet", "rows": -1, "bytes": 0, "hash": shard["hash"]},
        ],
    )
    with pytest.raises(SpecError) as caught:
        DatasetIndex.read(folder)
    faults = "\n".join(caught.value.faults)
    for message in (
        'bytes: found "many", expected a whole number',
        "unknown field `colour`",
        'shards[1].hash: found "md5:1", expected sha256: and 64 digits',
        'shards[2].path: found "../x.parquet", expected a path inside the folder',
        "shards[2].rows: found 1.0, expected a whole number",
        'shards[3].path: found "/abs.parquet"',
        "shards[3].rows: found -1",
        "shards[3].bytes: found 0",
        'shards[1].path: "a.parquet" is listed twice',
    ):
        assert message in faults, message
    (folder / "index.json").write_text(json.dumps({**good, "rows": 99, "bytes": 1}))
    with pytest.raises(SpecError, match="rows: found 99, expected 15") as caught:
        DatasetIndex.read(folder)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": "dataset_index.v2", "parts": []}', r'found "dataset_index\.v2"'),
        ("{", "line 1, column 2"),
        ("", "the document is empty"),
        ("[]", "expected an object"),
        ("\x00", "NUL"),
    ],
)
def test_a_document_that_is_no_index_of_this_version_has_one_fault(folder, content, message):
    DatasetIndex.build(folder)
    (folder / "index.json").write_text(content)
    with pytest.raises(SpecError, match=message) as caught:
        DatasetIndex.read(folder)
    assert len(caught.value.faults) == 1


def test_an_index_without_its_schema_is_refused(folder, tmp_path):
    DatasetIndex.build(folder)
    rewrite(folder / "schema.json", columns=json.loads((folder / "schema.json").read_text())["columns"][:1])
    with pytest.raises(InputError, match=r"its columns are not those of index\.json"):
        DatasetIndex.read(folder)
    (folder / "schema.json").unlink()
    with pytest.raises(InputError, match=r"schema\.json: no such file: .*DatasetIndex.build"):
        DatasetIndex.read(folder)
    with pytest.raises(InputError, match=r"index\.json: cannot be read: No such file.*DatasetIndex.build"):
        DatasetIndex.read(tmp_path)


def test_a_fault_that_a_lenient_reader_lets_pass_is_one(folder):
    index = DatasetIndex.build(folder)
    text = index.to_json().decode()
    for wrong, message in (
        (text.replace('"rows": 15,', '"rows": 15.0,'), "rows: found 15.0, expected a whole number"),
        (text.replace('"rows": 15,', '"rows": 7,\n  "rows": 15,'), 'the key "rows" is given more than once'),
        (msgspec.structs.replace(index, rows=16).to_json().decode(), "rows: found 16, expected 15"),
        (msgspec.structs.replace(index, size_bytes=1).to_json().decode(), "bytes: found 1, expected"),
    ):
        assert wrong != text
        (folder / "index.json").write_text(wrong)
        with pytest.raises(SpecError) as caught:
            DatasetIndex.read(folder)
        assert len(caught.value.faults) == 1
        assert message in str(caught.value)


def test_a_reformatted_index_reads_the_same(folder):
    index = DatasetIndex.build(folder)
    rewrite(folder / "index.json")
    assert DatasetIndex.read(folder) == index


@given(st.text(alphabet="a./\\ \n\x00é", max_size=12))
def test_a_shard_path_stays_inside_the_folder(text):
    record = {"path": text, "rows": 1, "bytes": 1, "hash": "sha256:" + "0" * 64}
    is_plain = (
        text != ""
        and "\x00" not in text
        and not text.startswith("/")
        and os.path.normpath(text) == text
        and text.split("/")[0] not in (".", "..")
    )
    try:
        msgspec.convert(record, ShardRecord)
    except msgspec.ValidationError:
        assert not is_plain
    else:
        assert is_plain


# --- crashes


BUILD = (
    "import sys; from gen_worker.contract import failpoints; from gen_worker.trainer.datasets.index import DatasetIndex;"
    "failpoints.arm(sys.argv[2]); DatasetIndex.build(sys.argv[1])"
)


@pytest.mark.parametrize("place", ["dataset.staged", "dataset.schema_renamed", "dataset.index_renamed"])
def test_a_kill_leaves_the_old_index_or_the_new_one(folder, place):
    old = DatasetIndex.build(folder)
    for path in folder.rglob("*.parquet"):  # other columns, so that both documents change
        write(path, id=pa.array([1]), score=pa.array([0.5]))
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder), f"{place}=kill"], check=False)
    assert done.returncode == -9
    index = dataset_index._decode_own((folder / "index.json").read_bytes())
    assert index is not None
    assert (index.digest == old.digest) == (place != "dataset.index_renamed")
    if place == "dataset.schema_renamed":  # the old index does not pass for one of the new columns
        with pytest.raises(InputError, match="its columns are not those"):
            DatasetIndex.read(folder)
    else:
        assert DatasetIndex.read(folder) == index
    assert DatasetIndex.build(folder).rows == 3
    assert DatasetIndex.read(folder).rows == 3


def test_a_full_disk_is_an_error_that_leaves_what_was_there(folder):
    old = DatasetIndex.build(folder)
    before = (folder / "schema.json").read_bytes()
    for path in folder.rglob("*.parquet"):
        write(path, id=pa.array([1]), score=pa.array([0.5]))
    failpoints.arm("dataset.staged=enospc")
    try:
        with pytest.raises(InputError, match=r"the index cannot be written: .*no space left"):
            DatasetIndex.build(folder)
    finally:
        failpoints.arm("")
    assert DatasetIndex.read(folder) == old
    assert (folder / "schema.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["a.parquet", "b", "index.json", "schema.json"]


# --- the schema


TYPES = [
    (pa.float32(), "float32", None, "scalar"),
    (pa.float16(), "float16", None, "scalar"),
    (pa.float64(), "float64", None, "scalar"),
    (pa.uint8(), "uint8", None, "scalar"),
    (pa.bool_(), "bool", None, "scalar"),
    (pa.string(), "string", None, "text"),
    (pa.large_string(), "string", None, "text"),
    (pa.binary(), "binary", None, "bytes"),
    (pa.large_binary(), "binary", None, "bytes"),
    (pa.binary(16), "fixed_size_binary[16]", None, "other"),
    (pa.timestamp("us", "UTC"), "timestamp[us, tz=UTC]", None, "time"),
    (pa.date32(), "date32[day]", None, "time"),
    (pa.decimal128(10, 2), "decimal128(10, 2)", None, "other"),
    (pa.list_(pa.float32(), 4), "float32", [4], "tensor"),
    (pa.list_(pa.list_(pa.int64(), 3), 2), "int64", [2, 3], "tensor"),
    (pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0]), "float32", [3, 2], "tensor"),
    (pa.list_(pa.float32()), "float32", [None], "list"),
    (pa.large_list(pa.list_(pa.float32(), 3)), "float32", [None, 3], "list"),
    (pa.list_(pa.string(), 2), "string", [2], "list"),
    (
        pa.struct([("a", pa.float64()), ("b", pa.list_(pa.int8(), 2))]),
        "struct<a: float64, b: int8[2]>",
        None,
        "other",
    ),
    (pa.map_(pa.string(), pa.int64()), "map<string, int64>", None, "other"),
]


@pytest.mark.parametrize(("type_", "dtype", "shape", "kind"), TYPES, ids=str)
def test_a_type_in_words(type_, dtype, shape, kind):
    (column,) = DatasetSchema.from_arrow(pa.schema([pa.field("x", type_, nullable=False)])).columns
    assert (column.dtype, column.shape, column.kind, column.nullable) == (dtype, shape, kind, False)


def field_types(depth: int = 2) -> st.SearchStrategy[pa.DataType]:
    flat = st.sampled_from(
        [pa.int8(), pa.float64(), pa.string(), pa.binary(), pa.bool_(), pa.timestamp("ms")]
    )
    if not depth:
        return flat
    inner = field_types(depth - 1)
    return st.one_of(
        flat,
        inner.map(pa.list_),
        st.builds(pa.list_, inner, st.integers(0, 5)),
        inner.map(lambda t: pa.struct([("a", t)])),
    )


ARROW_SCHEMAS = st.dictionaries(
    st.text(st.characters(blacklist_characters="\x00", blacklist_categories=("Cs",)), max_size=6),
    st.tuples(field_types(), st.booleans()),
    max_size=5,
).map(lambda fields: pa.schema([pa.field(name, type_, null) for name, (type_, null) in fields.items()]))


@settings(max_examples=50)
@given(ARROW_SCHEMAS)
def test_a_schema_survives_its_file_and_fits_the_data_it_was_made_of(arrow_schema):
    schema = DatasetSchema.from_arrow(arrow_schema)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "schema.json"
        path.write_bytes(schema.to_json())
        read = DatasetSchema.read(path)
    assert read == schema
    assert read.digest == schema.digest
    assert check_schema(read, arrow_schema, "here") == []
    for at, field in enumerate(arrow_schema):
        other = arrow_schema.set(at, field.with_type(pa.list_(field.type, 7)))
        with pytest.raises(InputError, match="expected"):
            check_schema(schema, other, "here")
        assert DatasetSchema.from_arrow(other).digest != schema.digest


def test_every_column_that_does_not_fit_is_named_with_both_types():
    schema = DatasetSchema.from_arrow(
        pa.schema(
            [
                ("image", pa.list_(pa.list_(pa.float32(), 224), 3)),
                ("label", pa.int64()),
                pa.field("id", pa.int64(), nullable=False),
                pa.field("same", pa.string()),
                pa.field("caption", pa.string()),
            ]
        )
    )
    found = pa.schema(
        [
            ("image", pa.list_(pa.float32())),
            ("lable", pa.int64()),
            ("id", pa.int64()),
            pa.field("same", pa.large_string(), nullable=False),
        ]
    )
    with pytest.raises(InputError) as caught:
        check_schema(schema, found, "part.parquet")
    assert str(caught.value).splitlines() == [
        "part.parquet: 4 faults",
        "  - column 'image' is float32[any], expected float32[3, 224]",
        "  - no column 'label', expected int64: did you mean 'lable'?",
        "  - column 'id' is int64, expected int64 not null",
        "  - no column 'caption', expected string: it has image, lable, id, same",
    ]


def test_more_columns_than_expected_are_allowed_and_told():
    schema = DatasetSchema.from_arrow(pa.schema([("a", pa.int64())]))
    assert check_schema(schema, pa.schema([("b", pa.int8()), ("a", pa.int64())]), "x") == ["b"]


def test_hints_of_people_are_kept_and_need_no_new_index(tmp_path):
    write(tmp_path / "a.parquet", image=pa.array([b"x"]), mask=pa.array([b"y"]), id=pa.array([1]))
    index = DatasetIndex.build(tmp_path)
    document = json.loads((tmp_path / "schema.json").read_text())
    document["columns"][0] |= {"kind": "image", "encoding": "png"}
    (tmp_path / "schema.json").write_text(json.dumps(document))
    assert DatasetIndex.read(tmp_path) == index
    write(tmp_path / "b.parquet", image=pa.array([b"x"]), mask=pa.array([b"y"]), id=pa.array([2]))
    again = DatasetIndex.build(tmp_path)
    image, mask, _ = again.read_schema(tmp_path).columns
    assert (image.kind, image.encoding) == ("image", "png")
    assert (mask.kind, mask.encoding) == ("bytes", None)
    assert (tmp_path / "schema.json").read_text() == json.dumps(document)  # not even reformatted


def test_all_faults_of_a_schema_come_in_one_error(tmp_path):
    column = {"name": "a", "dtype": "int64", "shape": None, "nullable": True, "kind": "scalar"}
    columns = [
        column,
        column,
        {**column, "name": "b", "encoding": "png"},
        {**column, "name": "c", "kind": "image"},
        {**column, "name": "d", "shape": [-1]},
        {"name": "e", "dtype": "binary", "shape": None, "nullable": True, "kind": "image", "encoding": "gif"},
    ]
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"schema_version": "dataset_schema.v1", "columns": columns}))
    with pytest.raises(SpecError) as caught:
        DatasetSchema.read(tmp_path)
    faults = "\n".join(caught.value.faults)
    for message in (
        'columns[1].name: "a" is given twice',
        "columns[2].encoding: only a binary column has an encoding, this is int64",
        'columns[3].kind: found "image", expected "scalar" for int64',
        "columns[4].shape[0]: found -1",
        'columns[5].encoding: found "gif", expected "png" or "jpeg" or null',
    ):
        assert message in faults, message


# --- paths of a job


def test_indexed_folders_become_their_shards_and_the_rest_stays(folder, tmp_path, monkeypatch):
    index = DatasetIndex.build(folder)
    plain = write(tmp_path / "plain" / "x.parquet")
    monkeypatch.chdir(tmp_path)
    shards = [str(folder / name) for name in ("a.parquet", "b/1.parquet", "b/2.parquet")]
    resolved = resolve_dataset_paths(
        ["plain", "data", str(plain), "none/*.parquet", "data/index.json", "gone"]
    )
    assert resolved.parquet_paths == ["plain", *shards, str(plain), "none/*.parquet", *shards, "gone"]
    assert resolved.indexes == [(folder, index)] * 2
    assert resolved.schema == index.read_schema(folder)
    untouched = resolve_dataset_paths(["plain"])
    assert (untouched.parquet_paths, untouched.indexes, untouched.schema) == (["plain"], [], None)


def test_datasets_of_different_columns_have_no_one_schema(folder, tmp_path):
    write(tmp_path / "other" / "x.parquet", text=pa.array(["x"]))
    DatasetIndex.build(folder)
    DatasetIndex.build(tmp_path / "other")
    resolved = resolve_dataset_paths([str(folder), str(tmp_path / "other")])
    assert resolved.schema is None
    assert [schema.names for schema in resolved.schemas] == [["id", "label"], ["text"]]


def test_a_shard_that_was_replaced_by_a_link_out_is_refused(folder, tmp_path):
    index = DatasetIndex.build(folder)
    (folder / "a.parquet").rename(tmp_path / "a.parquet")
    (folder / "a.parquet").symlink_to(tmp_path / "a.parquet")
    (folder / "b").rename(tmp_path / "b")
    (folder / "b").symlink_to(tmp_path / "b")
    with pytest.raises(InputError, match="3 faults"):
        index.shard_paths(folder)
    with pytest.raises(InputError, match=r"a\.parquet: a link out of the folder"):
        resolve_dataset_paths([str(folder)])


def test_a_broken_index_is_not_passed_over(folder):
    (folder / "index.json").write_text("{}")
    with pytest.raises(SpecError, match="schema_version: missing"):
        resolve_dataset_paths([str(folder)])


def test_reading_an_index_loads_nothing_heavy():
    code = (
        "import sys, gen_worker.trainer.datasets.index, gen_worker.trainer.datasets.shard_loader;"
        "assert not {'pyarrow', 'numpy', 'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
