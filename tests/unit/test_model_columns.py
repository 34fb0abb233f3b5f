"""Columns cross the border between front and model as they are: types, order, bits; what does not fit is named."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_worker.contract.job.rules import parse_job_spec
from gen_worker.errors import PluginError
from gen_worker.inference.messages import ColumnData, ColumnType, Part
from gen_worker.inference.model.columns import (
    ALIGNMENT,
    Answer,
    PartsReader,
    RowsError,
    answer_batch,
    column_types,
    encode_answer,
    fit_batch,
    is_always_aligned,
    pad_batch,
    read_parts,
)
from gen_worker.inference.model.inputs import RecordedData, make_rows, schema_of_records
from gen_worker.inference.model.orders import threads_of_worker
from gen_worker.inference.model.predictor import OutputError, read_answer
from gen_worker.inference.shapes import batch_shapes, shape_for

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    [
        ("number", pa.float32()),
        ("vector", pa.list_(pa.float32(), 3)),
        ("matrix", pa.list_(pa.list_(pa.int16(), 2), 2)),
        ("tensor", pa.fixed_shape_tensor(pa.float32(), (2, 2))),
        ("tokens", pa.list_(pa.int64())),
        ("flag", pa.bool_()),
        ("text", pa.string()),
        ("code", pa.dictionary(pa.int32(), pa.string())),
        ("image", IMAGE),
        ("when", pa.timestamp("us")),
    ]
)


def packed(name: str, values: "np.ndarray[Any, Any]") -> tuple[ColumnData, bytes]:
    content = values.tobytes()
    data = ColumnData(
        name=name, encoding="packed", size_bytes=len(content), dtype=str(values.dtype), dims=values.shape[1:]
    )
    return data, content


def listed(name: str, values: list[Any]) -> tuple[ColumnData, bytes]:
    content = msgspec.msgpack.encode(values)
    return ColumnData(name=name, encoding="values", size_bytes=len(content)), content


def part(num_rows: int, *columns: tuple[ColumnData, bytes]) -> tuple[Part, bytes]:
    found = Part(num_rows=num_rows, columns=tuple(data for data, _ in columns))
    return found, b"".join(content for _, content in columns)


def read(*parts: tuple[Part, bytes], schema: pa.Schema | None, shape: int) -> pa.RecordBatch:
    payload = memoryview(b"".join(content for _, content in parts))
    batch = read_parts([one for one, _ in parts], payload, schema=schema, shape=shape)
    batch.validate(full=True)
    return batch


def test_shapes_are_powers_of_eight_and_the_largest_batch() -> None:
    assert batch_shapes(32) == (1, 8, 32)
    assert batch_shapes(8) == (1, 8)
    assert batch_shapes(1) == (1,)
    assert batch_shapes(100) == (1, 8, 64, 100)
    assert [shape_for(rows, 32) for rows in (1, 2, 8, 9, 32)] == [1, 8, 8, 32, 32]


def test_the_cpus_of_a_run_are_shared_out_among_its_workers() -> None:
    assert [threads_of_worker(cpus, 2) for cpus in (None, 1, 2, 5)] == [1, 1, 1, 2]


def test_types_are_told_by_the_value_of_a_row() -> None:
    assert {column.name: (column.dtype, column.dims) for column in column_types(SCHEMA)} == {
        "number": ("float32", ()),
        "vector": ("float32", (3,)),
        "matrix": ("int16", (2, 2)),
        "tensor": ("float32", (2, 2)),
        "tokens": ("int64", (None,)),
        "flag": ("bool", ()),
        "text": ("string", ()),
        "code": ("string", ()),
        "image": ("binary", ()),
        "when": ("any", ()),
    }


def test_packed_numbers_become_the_types_of_the_training_data() -> None:
    values = {
        "vector": np.arange(6, dtype="float32").reshape(2, 3),
        "matrix": np.arange(8, dtype="int16").reshape(2, 2, 2),
        "tensor": np.arange(8, dtype="float32").reshape(2, 2, 2),
        "tokens": np.arange(8, dtype="int64").reshape(2, 4),
        "flag": np.array([True, False]),
    }
    schema = pa.schema([SCHEMA.field(name) for name in values])
    given_ = part(2, *(packed(name, column) for name, column in values.items()))
    batch = read(given_, schema=schema, shape=3)
    assert batch.schema == schema
    assert batch.num_rows == 3
    tensor = values.pop("tensor")
    assert batch.column("tensor").to_numpy_ndarray().tolist() == [*tensor.tolist(), tensor.tolist()[-1]]
    for name, column in values.items():
        assert batch.column(name).to_pylist() == [*column.tolist(), column.tolist()[-1]]


def test_values_become_the_types_of_the_training_data() -> None:
    names = ["number", "tokens", "text", "code", "image"]
    schema = pa.schema([SCHEMA.field(name) for name in names])
    one = part(
        1,
        listed("number", [1]),
        listed("tokens", [[1, 2]]),
        listed("text", ["ä"]),
        listed("code", ["a"]),
        listed("image", [b"png"]),
    )
    other = part(
        1,
        packed("number", np.array([2.0])),
        packed("tokens", np.array([[7, 8, 9]])),
        listed("text", [None]),
        listed("code", ["b"]),
        listed("image", [{"bytes": b"jpg", "path": "x"}]),
    )
    batch = read(one, other, schema=schema, shape=3)
    assert batch.schema == schema
    assert batch.column("number").to_pylist() == [1.0, 2.0, 2.0]
    assert batch.column("tokens").to_pylist() == [[1, 2], [7, 8, 9], [7, 8, 9]]
    assert batch.column("text").to_pylist() == ["ä", None, None]
    assert batch.column("code").to_pylist() == ["a", "b", "b"]
    last = {"bytes": b"jpg", "path": "x"}
    assert batch.column("image").to_pylist() == [{"bytes": b"png", "path": None}, last, last]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 8))
def test_the_rows_of_all_parts_are_there_in_order_and_the_rest_is_the_last_row(
    sizes: list[int], extra: int
) -> None:
    total = sum(sizes)
    values = np.arange(total * 3, dtype="float32").reshape(total, 3)
    starts = np.cumsum([0, *sizes])
    parts = [
        part(size, packed("vector", values[start : start + size]))
        for start, size in zip(starts, sizes, strict=False)
    ]
    batch = read(*parts, schema=pa.schema([SCHEMA.field("vector")]), shape=total + extra)
    expected = np.concatenate([values, np.repeat(values[-1:], extra, axis=0)])
    found = batch.column("vector").flatten().to_numpy().reshape(-1, 3)
    assert found.tobytes() == expected.tobytes()
    assert batch.column("vector").values.buffers()[1].address % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            [packed("vector", np.zeros((1, 4), "float32"))],
            "column 'vector': a row has the shape [4], expected [3]",
        ),
        ([packed("vector", np.zeros(1, "float32"))], "column 'vector': a row has the shape [], expected [3]"),
        (
            [packed("vector", np.zeros((1, 3), "complex64"))],
            "column 'vector': found complex64, expected float32",
        ),
        ([listed("vector", ["text"])], "column 'vector', row 0: found 'text'"),
        ([listed("vector", [[1.0, 2.0]])], "column 'vector', row 0: found [1.0, 2.0]"),
        ([listed("vector", [[1.0, 2.0, 3.0]] * 2)], "column 'vector' has 2 values for 1 rows"),
        ([listed("other", [1])], "no column 'vector' in a request"),
    ],
)
def test_what_does_not_fit_is_named(columns: list[tuple[ColumnData, bytes]], words: str) -> None:
    with pytest.raises(RowsError) as found:
        read(part(1, *columns), schema=pa.schema([SCHEMA.field("vector")]), shape=1)
    assert words in str(found.value)


def test_without_a_schema_the_rows_come_as_they_are() -> None:
    one = part(1, packed("a", np.array([[1, 2]], "int32")), listed("b", ["x"]))
    other = part(1, packed("a", np.array([[3, 4]], "int32")), listed("b", [5]))
    with pytest.raises(RowsError, match="column 'b': its values have no common type"):
        read(one, other, schema=None, shape=2)
    batch = read(one, schema=None, shape=2)
    assert batch.to_pylist() == [{"a": [1, 2], "b": "x"}] * 2
    with pytest.raises(RowsError, match="different columns"):
        read(one, part(1, listed("a", [1])), schema=None, shape=2)


def test_a_batch_of_a_file_gets_the_types_of_the_training_data() -> None:
    schema = pa.schema([SCHEMA.field("vector"), SCHEMA.field("text")])
    batch = pa.record_batch(
        {
            "text": pa.array(["a", "b"], pa.large_string()),
            "more": [1, 2],
            "vector": pa.array([[1.0, 2.0, 3.0]] * 2, pa.list_(pa.float64(), 3)),
        }
    )
    assert fit_batch(batch, schema).schema == schema
    with pytest.raises(RowsError, match="column 'vector': found string"):
        fit_batch(pa.record_batch({"vector": ["x"], "text": ["y"]}), schema)


def test_numbers_are_aligned_wherever_they_were_in_the_file() -> None:
    x = np.arange(300, dtype="float32").reshape(100, 3)
    whole = pa.record_batch({"vector": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 3)})
    for start in (0, 1, 7, 33):
        batch = pad_batch(whole.slice(start, 5), 8)
        values = batch.column("vector").values
        assert (values.buffers()[1].address + 4 * values.offset) % ALIGNMENT == 0
        assert batch.column("vector").to_pylist() == [
            *x[start : start + 5].tolist(),
            *[x[start + 4].tolist()] * 3,
        ]


@pytest.mark.parametrize("schema", [pa.schema([SCHEMA.field("vector"), SCHEMA.field("number")]), None])
def test_numbers_of_an_arrow_stream_are_aligned_wherever_it_is_in_a_frame(schema: pa.Schema | None) -> None:
    vector = np.arange(12, dtype="float32").reshape(4, 3)
    answer = Answer(columns={"vector": vector, "number": vector[:, 0].copy()}, num_rows=4)
    one, pieces = encode_answer(answer, "ipc")
    content = b"".join(pieces)
    reader = PartsReader(schema)
    for offset in range(0, 64, 7):
        frame = bytearray(b" " * offset + content)
        batch = reader.read([one], memoryview(frame)[offset:], 4)
        batch.validate(full=True)
        for values in (batch.column("vector").values, batch.column("number")):
            assert (values.buffers()[1].address + 4 * values.offset) % ALIGNMENT == 0
        assert batch.column("vector").to_pylist() == vector.tolist()
        assert batch.column("number").to_pylist() == vector[:, 0].tolist()


def test_slices_are_taken_without_a_copy_only_where_each_begins_aligned() -> None:
    vector = pa.schema([SCHEMA.field("vector")])  # 12 bytes a row
    assert not is_always_aligned(vector, 8)
    assert is_always_aligned(vector, 16)
    assert not is_always_aligned(pa.schema([SCHEMA.field("tokens")]), 16)
    assert not is_always_aligned(pa.schema([SCHEMA.field("text")]), 16)


# Answers.


def test_answers_are_read_from_whatever_holds_columns() -> None:
    import torch

    found = read_answer(
        {
            "tensor": torch.ones(2, 3, requires_grad=True),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "array": np.array([1, 2], "int8"),
            "texts": ["a", None],
            "floats": [1.0, 2.0],
            "arrow": pa.chunked_array([[1], [2]]),
            "rows": [np.zeros(2), np.ones(2)],
            "objects": np.array(["x", "y"]),
        },
        2,
    )
    kinds = {
        name: (str(values.dtype), values.shape) if isinstance(values, np.ndarray) else values
        for name, values in found.columns.items()
    }
    assert kinds == {
        "tensor": ("float32", (2, 3)),
        "half": ("float32", (2,)),
        "array": ("int8", (2,)),
        "texts": ["a", None],
        "floats": ("float64", (2,)),
        "arrow": ("int64", (2,)),
        "rows": ("float64", (2, 2)),
        "objects": ["x", "y"],
    }


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (None, "output", "predict returned NoneType, expected a dict of columns"),
        ({}, "output", "no columns"),
        ({1: [1, 2]}, "output", "a column named 1"),
        ({"y": "ab"}, "output", "a str as 'y'"),
        ({"y": 1.0}, "output", "a float as 'y'"),
        ([1, 2], "output", "a list of int, expected records"),
        ([{"a": 1}, {"b": 2}], "output", "a record 1 with the names b, but the first has a"),
        ({"y": [1, 2, 3]}, "row_count", "3 values of 'y' for 2 rows"),
        ({"x": [1, 2], "y": np.zeros((1, 2))}, "row_count", "1 values of 'y' for 2 rows"),
        ({"y": np.float64(1)}, "output", "a float64 as 'y'"),
        ({"y": np.array(1.0)}, "row_count", "one value of 'y'"),
        ([{"a": 1}], "row_count", "1 values of 'a' for 2 rows"),
    ],
)
def test_an_answer_that_is_not_one_value_a_row_and_name_is_an_error(
    found: Any, kind: str, words: str
) -> None:
    with pytest.raises(OutputError) as fault:
        read_answer(found, 2)
    assert fault.value.kind == kind
    assert words in str(fault.value)


@given(
    st.integers(1, 5),
    st.sampled_from(["float32", "float64", "int8", "uint16", "int64", "bool", "float16"]),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
)
def test_an_answer_keeps_its_bits_packed_and_as_arrow(rows: int, dtype: str, dims: tuple[int, ...]) -> None:
    values = (np.random.default_rng(0).random((rows, *dims)) * 100).astype(dtype)
    answer = Answer(columns={"y": values, "text": [f"{number}" for number in range(rows)]}, num_rows=rows)
    one, payload = encode_answer(answer, "columns")
    content = b"".join(bytes(piece) for piece in payload)
    assert len(content) == one.payload_bytes
    number, text = one.columns
    assert (
        np.frombuffer(content[: number.size_bytes], dtype).reshape(values.shape).tobytes() == values.tobytes()
    )
    assert msgspec.msgpack.decode(content[number.size_bytes :]) == answer.columns["text"]
    assert (text.dtype, number.dims) == ("", dims)
    batch = answer_batch(answer)
    batch.validate(full=True)
    assert batch.column("y").to_pylist() == values.tolist()


# What a version's inputs are.


def recorded(path: Path, **job: Any) -> RecordedData:
    from gen_worker.trainer.feed.manifest import read_manifest

    manifest = read_manifest([str(path)])
    dataset = {"parquet_paths": [str(path)], "batch_size": 4}
    spec = parse_job_spec({"run_id": "r", "max_steps": 1, "dataset": dataset, **job}, source="test")
    return RecordedData.of({"dataset_manifest": manifest.to_builtins()}, spec, path.parent)


def test_the_training_data_is_known_from_the_checkpoint_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0, 4.0, 5.0], "n": [None, 1, 2, 3, 4]}), path)
    data = recorded(path)
    assert data.schema is not None
    assert data.schema.names == ["x", "n"]
    assert (data.num_rows, data.batches_per_epoch) == (5, 2)
    assert data.columns_with_nulls() == {"n"}
    rows = data.first_rows()
    assert rows is not None
    assert rows.column("x").to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    path.unlink()
    assert data.first_rows() is None
    assert data.columns_with_nulls() == set()


def test_rows_can_be_made_of_any_types() -> None:
    schema = pa.schema([field for field in SCHEMA if field.name != "when"])
    rows = make_rows(schema, 3)
    rows.validate(full=True)
    assert rows.num_rows == 3
    assert rows.column("vector").to_pylist() == [[0.0, 0.0, 0.0]] * 3
    assert rows.column("text").to_pylist() == [""] * 3


class Inner(msgspec.Struct):
    name: str


class Record(msgspec.Struct):
    x: list[float]
    inner: Inner
    count: int = 0
    picture: bytes | None = None
    other: float = msgspec.field(default=0.0, name="renamed")


def test_annotated_records_are_columns() -> None:
    schema, nullable = schema_of_records(Record)
    assert nullable == ["picture"]
    assert column_types(schema, nullable=nullable) == (
        ColumnType(name="x", dtype="float64", dims=(None,)),
        ColumnType(name="inner", dtype="any"),
        ColumnType(name="count", dtype="int64"),
        ColumnType(name="picture", dtype="binary", is_nullable=True),
        ColumnType(name="renamed", dtype="float64"),
    )

    class Odd(msgspec.Struct):
        what: complex

    with pytest.raises(PluginError, match="a field of type"):
        schema_of_records(Odd)
