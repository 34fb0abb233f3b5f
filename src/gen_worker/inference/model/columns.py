"""Columns between frames, Arrow and numpy. Numbers are copied once, into aligned memory: kernels may sum unaligned
memory in another order, and then the bits of a row would depend on its place in a frame or a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gen_worker.inference.frames import Buffer
from gen_worker.inference.messages import ColumnData, ColumnType, Part

ALIGNMENT = 64  # bytes of a cache line, as Arrow and torch allocate

Array = npt.NDArray[Any]
Values = Array | list[Any]

_values_decoder = msgspec.msgpack.Decoder(list[Any])


class RowsError(ValueError):
    """Rows that cannot be given to the model. The words are for the client."""


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
    value_type, dims = _take_apart(data_type)
    return ColumnType(name=name, dtype=_dtype_name(value_type), dims=dims, is_nullable=is_nullable)


def _take_apart(data_type: pa.DataType) -> tuple[pa.DataType, tuple[int | None, ...]]:
    """(type of a value, dims of a row)."""
    if isinstance(data_type, pa.FixedShapeTensorType):
        return data_type.value_type, tuple(data_type.shape)
    if isinstance(data_type, pa.BaseExtensionType):
        return _take_apart(data_type.storage_type)
    dims: list[int | None] = []
    while is_list(data_type):
        dims.append(data_type.list_size if pa.types.is_fixed_size_list(data_type) else None)
        data_type = data_type.value_type
    return data_type, tuple(dims)


def is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_fixed_size_list(data_type) or types.is_list(data_type) or types.is_large_list(data_type)
    )


def _dtype_name(data_type: pa.DataType) -> str:
    types = pa.types
    if types.is_dictionary(data_type):
        data_type = data_type.value_type
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_boolean(data_type):
        return str(np.dtype(data_type.to_pandas_dtype()))
    if types.is_string(data_type) or types.is_large_string(data_type):
        return "string"
    if types.is_binary(data_type) or types.is_large_binary(data_type) or is_file(data_type):
        return "binary"
    return "any"


def is_file(data_type: pa.DataType) -> bool:
    """A record of `bytes` and perhaps `path`, as datasets of images have it."""
    if not pa.types.is_struct(data_type):
        return False
    index = data_type.get_field_index("bytes")
    return index >= 0 and bool(pa.types.is_binary(data_type.field(index).type))


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


def read_parts(
    parts: Sequence[Part], payload: memoryview, *, schema: pa.Schema | None, shape: int
) -> pa.RecordBatch:
    """All rows of the parts, padded to `shape` with copies of the last one. Without a schema: as they came."""
    pieces: list[Mapping[str, Any]] = []
    start = 0
    for part in parts:
        pieces.append(_read_part(part, payload[start : start + part.payload_bytes]))
        start += part.payload_bytes
    if schema is None:
        names = list(pieces[0])
        if any(list(piece) != names for piece in pieces):
            raise RowsError("the requests of a batch have different columns")
        arrays = [_join(name, [piece[name] for piece in pieces], None, shape) for name in names]
        return pa.RecordBatch.from_arrays(arrays, names=names)
    missing = [name for name in schema.names for piece in pieces if name not in piece]
    if missing:
        raise RowsError(f"no column {missing[0]!r} in a request")
    arrays = [
        _join(field.name, [piece[field.name] for piece in pieces], field.type, shape) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _read_part(part: Part, payload: memoryview) -> dict[str, Any]:
    """By name: numbers as an array, other values as a list, Arrow as it is."""
    if part.encoding == "ipc":
        return _read_ipc(part, payload)
    found: dict[str, Any] = {}
    start = 0
    for column in part.columns:
        content = payload[start : start + column.size_bytes]
        start += column.size_bytes
        found[column.name] = values = _read_column(column, content, part.num_rows)
        if len(values) != part.num_rows:
            raise RowsError(f"column {column.name!r} has {len(values)} values for {part.num_rows} rows")
    return found


def _read_column(column: ColumnData, content: memoryview, num_rows: int) -> Values:
    if column.encoding == "packed":
        dtype = np.dtype(column.dtype).newbyteorder("<")
        return np.frombuffer(content, dtype=dtype).reshape(num_rows, *column.dims)
    return _values_decoder.decode(content)


def _read_ipc(part: Part, payload: memoryview) -> dict[str, Any]:
    try:
        table = pa.ipc.open_stream(pa.py_buffer(payload)).read_all()
        table.validate(full=True)  # offsets of a stranger may point anywhere
    except (pa.ArrowException, OSError, ValueError) as fault:
        raise RowsError(f"the body is not an Arrow IPC stream: {fault}") from fault
    if table.num_rows != part.num_rows:
        raise RowsError(f"the Arrow IPC stream has {table.num_rows} rows, expected {part.num_rows}")
    return {name: _one_array(table.column(name)) for name in table.column_names}


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _join(name: str, pieces: list[Any], data_type: pa.DataType | None, shape: int) -> pa.Array:
    """One column of `shape` rows."""
    first = pieces[0]
    if all(isinstance(piece, np.ndarray) and piece.shape[1:] == first.shape[1:] for piece in pieces):
        joined = _join_numbers(name, pieces, data_type, shape)
        if joined is not None:
            return joined
    arrays = [_to_arrow(name, piece, data_type) for piece in pieces]
    if len({array.type for array in arrays}) > 1:  # without a schema each has a type of its own
        arrays = [_to_arrow(name, [value for piece in pieces for value in _as_list(piece)], None)]
    return pad_array(pa.concat_arrays(arrays) if len(arrays) > 1 else arrays[0], shape)


def _join_numbers(
    name: str, pieces: Sequence[Array], data_type: pa.DataType | None, shape: int
) -> pa.Array | None:
    """Without Python values; None where the type is not one of numbers."""
    dims = pieces[0].shape[1:]
    if data_type is None:
        data_type = pa.from_numpy_dtype(pieces[0].dtype)
        for size in reversed(dims):
            data_type = pa.list_(data_type, size)
    value_type, wanted = _take_apart(data_type)
    if not _is_number(value_type):
        return None
    if len(wanted) != len(dims) or any(
        size not in (None, dim) for size, dim in zip(wanted, dims, strict=True)
    ):
        raise RowsError(
            f"column {name!r}: a row has the shape {list(dims)}, expected {_dims_in_words(wanted)}"
        )
    dtype = np.dtype(value_type.to_pandas_dtype())
    target, memory = _aligned((shape, *dims), dtype)
    start = 0
    for piece in pieces:
        try:
            np.copyto(target[start : start + len(piece)], piece, casting="same_kind")
        except TypeError as fault:
            raise RowsError(f"column {name!r}: found {piece.dtype}, expected {dtype}") from fault
        start += len(piece)
    target[start:] = target[start - 1]
    return _wrap_numbers(target, memory, data_type)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, pa.Buffer]:
    """New memory, aligned to a cache line."""
    memory = pa.allocate_buffer(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(memory, dtype=dtype).reshape(shape), memory


def _wrap_numbers(values: Array, memory: pa.Buffer, data_type: pa.DataType) -> pa.Array:
    """An array of that type over memory that holds its values, row after row."""
    if isinstance(data_type, pa.BaseExtensionType):
        storage = _wrap_numbers(values, memory, data_type.storage_type)
        return pa.ExtensionArray.from_storage(data_type, storage)
    value_type, sizes, lists = data_type, [], []
    while is_list(value_type):
        lists.append(value_type)
        value_type = value_type.value_type
    # A tensor of several dimensions has one list of all of them.
    sizes = list(values.shape[1:]) if len(lists) == values.ndim - 1 else [math.prod(values.shape[1:])]
    count = values.size
    if pa.types.is_boolean(value_type):
        array = pa.array(values.reshape(-1))
    else:
        array = pa.Array.from_buffers(value_type, count, [None, memory])
    for list_type, size in zip(reversed(lists), reversed(sizes), strict=True):
        count = count // size if size else len(values)
        if pa.types.is_fixed_size_list(list_type):
            array = pa.Array.from_buffers(list_type, count, [None], children=[array])
            continue
        width = np.int64 if pa.types.is_large_list(list_type) else np.int32
        offsets = pa.py_buffer(np.arange(0, (count + 1) * size, size or 1, dtype=width)[: count + 1])
        array = pa.Array.from_buffers(list_type, count, [None, offsets], children=[array])
    return array


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
        raise RowsError(_first_fault(name, values, data_type, fault)) from fault


def _first_fault(name: str, values: list[Any], data_type: pa.DataType, fault: Exception) -> str:
    for number, value in enumerate(values):
        try:
            pa.array([value], type=data_type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return f"column {name!r}, row {number}: found {value!r:.60}, expected {data_type}"
    return f"column {name!r}: expected {data_type}: {fault}"


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
    return pa.concat_arrays([array, array.take(pa.array(np.full(shape - num_rows, num_rows - 1)))])


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
        value_type, dims = _take_apart(field.type)
        if not _is_number(value_type) or any(size is None for size in dims):
            return False
        row_bytes = math.prod(size or 0 for size in dims) * np.dtype(value_type.to_pandas_dtype()).itemsize
        if pa.types.is_boolean(value_type) or num_rows * row_bytes % ALIGNMENT:
            return False
    return True


def _is_number(data_type: pa.DataType) -> bool:
    return _dtype_name(data_type) not in ("string", "binary", "any") and not pa.types.is_dictionary(data_type)


def _align(array: pa.Array) -> pa.Array:
    """A copy where it has only numbers and no nulls; else the array itself."""
    value_type, dims = _take_apart(array.type)
    if not _is_number(value_type):
        return array
    if any(size is None for size in dims) or pa.types.is_boolean(value_type):
        return array
    flat = array.storage if isinstance(array, pa.ExtensionArray) else array
    while is_list(flat.type):
        if flat.null_count:
            return array
        flat = flat.flatten()
    if flat.null_count:
        return array
    values = flat.to_numpy(zero_copy_only=True).reshape(len(array), *(size or 0 for size in dims))
    target, memory = _aligned(values.shape, values.dtype)
    target[:] = values
    return _wrap_numbers(target, memory, array.type)


# Answers -> parts.


def encode_answer(answer: Answer, encoding: str) -> tuple[Part, list[Buffer]]:
    """A part and its payload."""
    if encoding == "ipc":
        sink = pa.BufferOutputStream()
        batch = answer_batch(answer)
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        content = memoryview(sink.getvalue())
        return (
            Part(num_rows=answer.num_rows, encoding="ipc", size_bytes=len(content), answer="ipc"),
            [content],
        )
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
        data_type = pa.from_numpy_dtype(values.dtype)
        for size in reversed(values.shape[1:]):
            data_type = pa.list_(data_type, size)
        values = np.ascontiguousarray(values)
        memory = pa.py_buffer(values.reshape(-1).view(np.uint8) if values.size else b"")
        return _wrap_numbers(values, memory, data_type)
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
