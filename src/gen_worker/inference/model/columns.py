"""Columns between frames, Arrow and numpy. Numbers are copied once, into aligned memory: kernels may sum unaligned
memory in another order, and then the bits of a row would depend on its place in a frame or a file.

`pa.array` and `to_numpy` are called only for values that need them: they import pandas where it is installed, which takes
longer than to load a small model, and 23 MB.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from gen_worker.inference.frames import Buffer
from gen_worker.inference.messages import ColumnData, ColumnType, Part
from gen_worker.inference.model.number_types import (
    Array,
    NumberType,
    aligned,
    dtype_name,
    is_file,
    is_number,
    number_type_of,
    number_type_of_numpy,
    take_apart,
)

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow IPC
ALIGNMENT = 64  # bytes of a cache line, as Arrow and torch allocate

Values = Array | list[Any]

_values_decoder = msgspec.msgpack.Decoder(list[Any])


class RowsError(ValueError):
    """Rows that cannot be given to the model. The words are for the client; the fields are of a value that does not fit."""

    def __init__(self, words: str, *, column: str = "", found: str = "", expected: str = "") -> None:
        super().__init__(words)
        self.column, self.found, self.expected = column, found, expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model answered: for each name a value per row, as an array or a list."""

    columns: Mapping[str, Values]
    num_rows: int

    def slice(self, start: int, stop: int) -> "Answer":
        return Answer(
            columns={name: values[start:stop] for name, values in self.columns.items()}, num_rows=stop - start
        )


# Types.


def column_types(schema: pa.Schema, *, nullable: Sequence[str] = ()) -> tuple[ColumnType, ...]:
    return tuple(column_type(field.name, field.type, is_nullable=field.name in nullable) for field in schema)


def column_type(name: str, data_type: pa.DataType, *, is_nullable: bool = False) -> ColumnType:
    value_type, dims = take_apart(data_type)
    return ColumnType(name=name, dtype=dtype_name(value_type), dims=dims, is_nullable=is_nullable)


def answer_types(answer: Answer) -> tuple[ColumnType, ...]:
    """As one answer shows them."""
    return tuple(_answer_type(name, values) for name, values in answer.columns.items())


def _answer_type(name: str, values: Values) -> ColumnType:
    if isinstance(values, np.ndarray):
        return ColumnType(name=name, dtype=str(values.dtype), dims=values.shape[1:])
    kinds: set[type] = {type(value) for value in values if value is not None}
    dtype = "string" if kinds == {str} else "binary" if kinds == {bytes} else "any"
    return ColumnType(name=name, dtype=dtype, is_nullable=any(value is None for value in values))


# Parts -> a record batch.


class PartsReader:
    """Makes record batches of one schema; without one, of the columns that come."""

    def __init__(self, schema: pa.Schema | None) -> None:
        self._schema = schema
        self._fields = (
            []
            if schema is None
            else [(field.name, field.type, number_type_of(field.type)) for field in schema]
        )

    def read(self, parts: Sequence[Part], payload: memoryview, shape: int) -> pa.RecordBatch:
        """All rows of the parts, padded to `shape` with copies of the last one."""
        pieces: list[Mapping[str, Any]] = []
        start = 0
        for part in parts:
            size = part.payload_bytes
            pieces.append(_read_part(part, payload[start : start + size]))
            start += size
        if self._schema is None:
            names = list(pieces[0])
            if any(list(piece) != names for piece in pieces):
                raise RowsError("the requests of a batch have different columns")
            arrays = [_join(name, [piece[name] for piece in pieces], None, None, shape) for name in names]
            return pa.RecordBatch.from_arrays(arrays, names=names)
        arrays = []
        for name, data_type, numbers in self._fields:
            try:
                columns = [piece[name] for piece in pieces]
            except KeyError:
                raise RowsError(f"no column {name!r} in a request") from None
            arrays.append(_join(name, columns, data_type, numbers, shape))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def read_parts(
    parts: Sequence[Part], payload: memoryview, *, schema: pa.Schema | None, shape: int
) -> pa.RecordBatch:
    """The same, once."""
    return PartsReader(schema).read(parts, payload, shape)


def _read_part(part: Part, payload: memoryview) -> dict[str, Any]:
    """By name: numbers as an array, other values as a list, Arrow as it is."""
    if part.encoding == "ipc":
        return _read_ipc(part, payload)
    found: dict[str, Any] = {}
    start = 0
    for column in part.columns:
        stop = start + column.size_bytes
        found[column.name] = values = _read_column(column, payload[start:stop], part.num_rows)
        start = stop
        if len(values) != part.num_rows:
            raise RowsError(f"column {column.name!r} has {len(values)} values for {part.num_rows} rows")
    return found


def _read_column(column: ColumnData, content: memoryview, num_rows: int) -> Values:
    if column.encoding == "packed":
        return np.frombuffer(content, dtype=_little_endian(column.dtype)).reshape(num_rows, *column.dims)
    return _values_decoder.decode(content)


@lru_cache(maxsize=64)
def _little_endian(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _read_ipc(part: Part, payload: memoryview) -> dict[str, Any]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            batches = [*reader]
            for batch in batches:
                batch.validate(full=True)  # offsets of a stranger may point anywhere
    except (pa.ArrowException, OSError, ValueError) as fault:
        raise RowsError(f"the body is not an Arrow IPC stream: {fault}") from fault
    num_rows = sum([batch.num_rows for batch in batches])
    if num_rows != part.num_rows:
        raise RowsError(f"the Arrow IPC stream has {num_rows} rows, expected {part.num_rows}")
    if len(batches) == 1:
        return dict(zip(batches[0].schema.names, batches[0].columns, strict=True))
    table = pa.Table.from_batches(batches)
    return {name: _one_array(table.column(name)) for name in table.column_names}


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _join(
    name: str, pieces: list[Any], data_type: pa.DataType | None, numbers: NumberType | None, shape: int
) -> pa.Array:
    """One column of `shape` rows. `numbers` is what is known of `data_type` if it is one of numbers."""
    if numbers is not None:
        pieces = [_prepare(name, piece, data_type, numbers) for piece in pieces]
    first = pieces[0]
    if (numbers is not None or data_type is None) and all(
        isinstance(piece, np.ndarray) and piece.shape[1:] == first.shape[1:] for piece in pieces
    ):
        return _join_numbers(
            name, pieces, numbers or number_type_of_numpy(first.dtype, first.shape[1:]), shape
        )
    arrays = [_to_arrow(name, piece, data_type) for piece in pieces]
    if len({array.type for array in arrays}) > 1:  # without a schema each has a type of its own
        arrays = [_to_arrow(name, [value for piece in pieces for value in _as_list(piece)], None)]
    joined = pad_array(pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0], shape)
    return _align(joined) if data_type is None else joined


def _prepare(name: str, piece: Any, data_type: pa.DataType | None, numbers: NumberType) -> Any:
    """Numbers that came as Arrow: as numpy's, to be copied into aligned memory as those of JSON are."""
    if not isinstance(piece, pa.Array):
        return piece
    array = _cast(name, piece, data_type)
    values = numbers.view(array)
    return array if values is None else values


def _join_numbers(name: str, pieces: Sequence[Array], numbers: NumberType, shape: int) -> pa.Array:
    """Without Python values."""
    dims, wanted = pieces[0].shape[1:], numbers.dims
    if dims != wanted and (
        len(wanted) != len(dims)
        or any(size not in (None, dim) for size, dim in zip(wanted, dims, strict=True))
    ):
        raise RowsError(
            f"column {name!r}: a row has the shape {list(dims)}, expected {_dims_in_words(wanted)}"
        )
    target, memory = aligned((shape, *dims), numbers.dtype)
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        try:
            np.copyto(target[start:stop], piece, casting="same_kind")
        except TypeError as fault:
            raise RowsError(f"column {name!r}: found {piece.dtype}, expected {numbers.dtype}") from fault
        start = stop
    if start < shape:
        target[start:] = target[start - 1]
    return numbers.wrap(target, memory)


def _to_arrow(name: str, values: Any, data_type: pa.DataType | None) -> pa.Array:
    if isinstance(values, pa.Array):
        return _cast(name, values, data_type)
    values = _as_list(values)
    if data_type is None:
        try:
            return pa.array(values)
        except (pa.ArrowException, TypeError, ValueError) as fault:
            raise RowsError(f"column {name!r}: its values have no common type: {fault}") from fault
    if isinstance(data_type, pa.BaseExtensionType):
        flat = (
            [_flat(value) for value in values] if isinstance(data_type, pa.FixedShapeTensorType) else values
        )
        return pa.ExtensionArray.from_storage(data_type, _to_arrow(name, flat, data_type.storage_type))
    if is_file(data_type):
        values = [{"bytes": value} if isinstance(value, bytes) else value for value in values]
    try:
        return pa.array(values, type=data_type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as fault:
        raise _first_fault(name, values, data_type, fault) from fault


def _first_fault(name: str, values: list[Any], data_type: pa.DataType, fault: Exception) -> RowsError:
    for number, value in enumerate(values):
        try:
            pa.array([value], type=data_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            found, expected = f"{value!r:.60}", str(data_type)
            words = f"column {name!r}, row {number}: found {found}, expected {expected}"
            return RowsError(words, column=name, found=found, expected=expected)
    return RowsError(f"column {name!r}: expected {data_type}: {fault}", column=name)


def _cast(name: str, array: pa.Array, data_type: pa.DataType | None) -> pa.Array:
    if data_type is None or array.type.equals(data_type):
        return array
    try:
        if isinstance(data_type, pa.BaseExtensionType):
            return pa.ExtensionArray.from_storage(data_type, _cast(name, array, data_type.storage_type))
        if isinstance(array.type, pa.BaseExtensionType):
            return _cast(name, array.storage, data_type)
        if is_file(data_type) and pa.types.is_binary(array.type):
            return _to_arrow(name, array.to_pylist(), data_type)
        return array.cast(data_type)
    except (pa.ArrowException, TypeError, ValueError) as fault:
        raise RowsError(f"column {name!r}: found {array.type}, expected {data_type}: {fault}") from fault


def _as_list(values: Any) -> list[Any]:
    found: list[Any]
    if isinstance(values, np.ndarray):
        found = values.tolist()
        return found
    found = values.to_pylist() if isinstance(values, pa.Array) else values
    return found


def _flat(value: Any) -> Any:
    return np.asarray(value).reshape(-1).tolist() if value is not None else None


def _dims_in_words(dims: Sequence[int | None]) -> str:
    return str(["any" if size is None else size for size in dims]).replace("'", "")


# Record batches.


def pad_array(array: pa.Array, shape: int) -> pa.Array:
    """With copies of its last row."""
    num_rows = len(array)
    if num_rows == shape:
        return array
    return pa.concat_arrays([array, *[array.slice(num_rows - 1)] * (shape - num_rows)])


def pad_batch(batch: pa.RecordBatch, shape: int) -> pa.RecordBatch:
    """Padded with copies of the last row, its numbers in aligned memory: as `read_parts` gives them."""
    arrays = [_align(pad_array(batch.column(index), shape)) for index in range(batch.num_columns)]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def fit_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """With the columns and types that the model knows. RowsError where that cannot be."""
    if batch.schema.equals(schema):
        return batch
    missing = [name for name in schema.names if name not in batch.schema.names]
    if missing:
        raise RowsError(f"no column {missing[0]!r}")
    arrays = [_cast(field.name, batch.column(field.name), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def is_always_aligned(schema: pa.Schema, num_rows: int) -> bool:
    """Whether every `num_rows` rows of an aligned batch begin at an aligned address, so that slices need no copy."""
    for field in schema:
        value_type, dims = take_apart(field.type)
        if not is_number(value_type) or any(size is None for size in dims):
            return False
        row_bytes = math.prod(size or 0 for size in dims) * np.dtype(value_type.to_pandas_dtype()).itemsize
        if pa.types.is_boolean(value_type) or num_rows * row_bytes % ALIGNMENT:
            return False
    return True


def _align(array: pa.Array) -> pa.Array:
    """A copy where it has only numbers and no nulls; else the array itself."""
    numbers = number_type_of(array.type)
    values = None if numbers is None else numbers.view(array)
    if numbers is None or values is None:
        return array
    target, memory = aligned(values.shape, values.dtype)
    target[:] = values
    return numbers.wrap(target, memory)


# Answers -> parts.


def encode_answer(answer: Answer, encoding: str) -> tuple[Part, list[Buffer]]:
    """A part and its payload."""
    if encoding == "ipc":
        batch = answer_batch(answer)
        pieces: list[Buffer] = [
            memoryview(batch.schema.serialize()),
            memoryview(batch.serialize()),
            END_OF_STREAM,
        ]
        size = sum([len(piece) for piece in pieces])
        return Part(num_rows=answer.num_rows, encoding="ipc", size_bytes=size, answer="ipc"), pieces
    columns: list[ColumnData] = []
    payload: list[Buffer] = []
    for name, values in answer.columns.items():
        if isinstance(values, np.ndarray):
            packed = np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")
            columns.append(
                ColumnData(
                    name=name,
                    encoding="packed",
                    size_bytes=len(packed),
                    dtype=str(values.dtype),
                    dims=values.shape[1:],
                )
            )
            payload.append(packed)
        else:
            encoded = msgspec.msgpack.encode(values, enc_hook=plain_value)
            columns.append(ColumnData(name=name, encoding="values", size_bytes=len(encoded)))
            payload.append(encoded)
    return Part(num_rows=answer.num_rows, columns=tuple(columns)), payload


def answer_batch(answer: Answer) -> pa.RecordBatch:
    arrays = [_answer_array(name, values) for name, values in answer.columns.items()]
    return pa.RecordBatch.from_arrays(arrays, names=list(answer.columns))


def _answer_array(name: str, values: Values) -> pa.Array:
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)
        memory = pa.py_buffer(values.reshape(-1).view(np.uint8) if values.size else b"")
        return number_type_of_numpy(values.dtype, values.shape[1:]).wrap(values, memory)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError) as fault:
        raise ValueError(f"the values of {name!r} have no common type: {fault}") from fault


def plain_value(value: Any) -> Any:
    """What an encoder does not know: arrays, tensors, numbers of numpy."""
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise TypeError(f"a {type(value).__name__} cannot be encoded")
    return to_list()
