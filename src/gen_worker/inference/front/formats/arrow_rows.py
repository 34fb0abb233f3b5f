"""Rows and answers as Arrow IPC streams. Imported by the first request that has one: pyarrow is not cheap.

What a client sent is checked here, before a model worker reads it: its buffers and offsets, its size when it is read, the
names of its columns. Whether the types fit is said by the model worker, which knows what it does with them.
"""

import struct
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.refusals import Refusal, RowFault
from gen_worker.inference.front.rows import IPC, Answer, Rows
from gen_worker.inference.messages import ColumnType

MAX_BATCHES = 1024  # of one request
MAX_SCHEMAS = 64
_SCHEMA, _RECORD_BATCH, _DICTIONARY = "schema", "record batch", "dictionary"
_LISTS = frozenset(
    kind.id for kind in (pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 1))
)
_FIXED_LIST = pa.list_(pa.int8(), 1).id
_HEADER, _COMPRESSION = 2, 3  # fields of the tables `Message` and `RecordBatch` in Arrow's Message.fbs


def read_stream(body: Buffer, inputs: Sequence[ColumnType], max_rows: int) -> Rows:
    """The rows of a request. Refusal where the stream is damaged, has other columns, or would need more than its size."""
    try:
        num_rows = _count_rows(body, tuple(inputs), max_rows)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as fault:
        raise Refusal(
            "input", f"the body is not an Arrow IPC stream that can be read: {_first_line(fault)}"
        ) from None
    if num_rows == 0:
        raise Refusal("input", "the stream has no rows, expected at least one")
    return Rows(IPC, num_rows, (body,))


def _count_rows(body: Buffer, inputs: tuple[ColumnType, ...], max_rows: int) -> int:
    """Each message is read and checked once."""
    messages = iter(pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))
    first = next(messages, None)
    if first is None or first.type != _SCHEMA:
        raise ValueError("it does not begin with a schema")
    schema = _read_schema(first, inputs)
    num_rows = 0
    for num_before, message in enumerate(messages):
        if message.type == _DICTIONARY:
            raise Refusal("input", "the stream has dictionaries, expected plain columns")
        if message.type != _RECORD_BATCH:
            raise ValueError(f"it has a {message.type} among its record batches")
        if num_before >= MAX_BATCHES:
            raise Refusal("input", f"the stream has more than {MAX_BATCHES} record batches")
        _require_plain(message)
        batch = pa.ipc.read_record_batch(message, schema)
        num_rows += batch.num_rows
        if num_rows > max_rows:
            raise Refusal("too_large", f"the request has more than {max_rows} rows, which can wait")
        batch.validate(full=True)
        _check_nulls(batch, inputs)
    return num_rows


# Those that fit, by their message and the columns of the model: a client sends the same one in all of its requests.
_schemas: dict[tuple[bytes, tuple[ColumnType, ...]], pa.Schema] = {}


def _read_schema(message: pa.Message, inputs: tuple[ColumnType, ...]) -> pa.Schema:
    key = message.metadata.to_pybytes(), inputs
    schema = _schemas.get(key)
    if schema is None:
        schema = pa.ipc.read_schema(message)
        _check_columns(schema, inputs)
        if len(_schemas) >= MAX_SCHEMAS:
            _schemas.clear()
        _schemas[key] = schema
    return schema


def slice_stream(data: Buffer, start: int, stop: int) -> bytes:
    """Some rows of a stream that was read before, as a stream."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return _write(reader.schema, reader.read_all().slice(start, stop - start).to_batches())


def encode_answer(answer: Answer) -> Buffer:
    """The answer to a stream, as a stream."""
    block, start, stop = answer.pieces[0]
    if len(answer.pieces) == 1 and start == 0 and stop == block.part.num_rows:
        return block.payload
    table = _read_answer(answer)
    return _write(table.schema, table.combine_chunks().to_batches())


def decode_answer(answer: Answer) -> list[dict[str, Any]]:
    """One mapping for each row."""
    found: list[dict[str, Any]] = _read_answer(answer).to_pylist()
    return found


def _read_answer(answer: Answer) -> pa.Table:
    tables = []
    for block, start, stop in answer.pieces:
        with pa.ipc.open_stream(pa.py_buffer(block.payload)) as reader:
            tables.append(reader.read_all().slice(start, stop - start))
    return pa.concat_tables(tables)


def _write(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _require_plain(message: pa.Message) -> None:
    """Not compressed: a small body must not become large when it is read."""
    metadata = message.metadata.to_pybytes()
    header = _follow(metadata, struct.unpack_from("<I", metadata)[0], _HEADER)
    if header is not None and _field(metadata, header, _COMPRESSION) is not None:
        raise Refusal("input", "the stream is compressed, expected plain buffers")


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a flatbuffer's table has a field; None where it does not have it. ValueError where the data is damaged."""
    try:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if vtable < 0:
            raise ValueError("a table points out of its message")
        size = struct.unpack_from("<H", data, vtable)[0]
        entry = 4 + 2 * number
        offset = struct.unpack_from("<H", data, vtable + entry)[0] if entry < size else 0
    except struct.error as fault:
        raise ValueError("a table points out of its message") from fault
    return table + offset if offset else None


def _follow(data: bytes, table: int, number: int) -> int | None:
    """The table that a field of another one points to."""
    place = _field(data, table, number)
    if place is None:
        return None
    try:
        target: int = place + struct.unpack_from("<I", data, place)[0]
    except struct.error as fault:
        raise ValueError("a table points out of its message") from fault
    return target


def _check_columns(schema: pa.Schema, inputs: Sequence[ColumnType]) -> None:
    faults = []
    for field in schema:
        if not _is_plain(field.type):
            faults.append(
                RowFault(
                    column=field.name[:100],
                    found=str(field.type)[:100],
                    expected="numbers, text, bytes or lists",
                )
            )
    names = schema.names
    known = {column.name for column in inputs}
    if inputs:
        faults += [
            RowFault(column=column.name, found="nothing", expected=f"a column of {column.dtype}")
            for column in inputs
            if column.name not in names and not column.is_nullable
        ]
        faults += [
            RowFault(
                column=name[:100], found="an unknown column", expected=f"only {', '.join(sorted(known))}"
            )
            for name in names
            if name not in known
        ]
    if not names or len(set(names)) < len(names):
        faults.append(RowFault(found=f"{len(names)} columns", expected="at least one, each name once"))
    if faults:
        first = faults[0]
        column = f"column {first.column}: " if first.column else ""
        raise Refusal("input", f"{column}found {first.found}, expected {first.expected}", faults=faults[:100])


def _check_nulls(batch: pa.RecordBatch, inputs: Sequence[ColumnType]) -> None:
    """As of rows in JSON: only a column that may be null has nulls, and no list does."""
    for column in inputs:
        index = batch.schema.get_field_index(column.name)
        array = None if index < 0 else batch.column(index)
        if array is None or (column.is_nullable and array.null_count):
            continue
        while not array.null_count and _is_list(array.type):
            is_whole = array.type.id == _FIXED_LIST and not array.offset
            array = array.values if is_whole else array.flatten()  # the first is five times as fast
        if array.null_count:
            fault = RowFault(column=column.name, found="null", expected=column.dtype)
            raise Refusal(
                "input", f"column {column.name}: found null, expected {column.dtype}", faults=[fault]
            )


def _is_list(kind: pa.DataType) -> bool:
    return kind.id in _LISTS


def _is_plain(kind: pa.DataType) -> bool:
    """Whether a value of it is as large as its part of the stream: none is shared by several rows, none takes no bytes."""
    types = pa.types
    if _is_list(kind):
        return not (types.is_fixed_size_list(kind) and kind.list_size == 0) and _is_plain(kind.value_type)
    if types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_plain(field.type) for field in kind)
    if types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > 0)
    return bool(
        types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_temporal(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _first_line(fault: Exception) -> str:
    return str(fault).partition("\n")[0][:200]
