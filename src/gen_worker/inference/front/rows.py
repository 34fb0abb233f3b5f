"""Rows of requests as a model worker gets them, and the rows of its answers.

The columns of a request are bytes from the start. So the requests of a batch become one part by joining bytes, and the
answer of each is a slice of the answer of all.
"""

import struct
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import chain, islice
from typing import Any

import msgspec

from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.frames import Buffer
from gen_worker.inference.messages import ColumnData, Part

# numpy's name of a type -> struct's letter
LETTERS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}

_decode_values = msgspec.msgpack.Decoder().decode
_split_values = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class Layout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the columns of some rows look like. Rows of the same layout can be joined into one part."""

    columns: tuple[ColumnData, ...] = ()  # their `size_bytes` are of one row; of `values` without meaning
    is_ipc: bool = False  # an Arrow IPC stream instead; never joined

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


IPC = Layout(is_ipc=True)


def packed_column(name: str, dtype: str, dims: Sequence[int]) -> ColumnData:
    size = struct.calcsize("<" + LETTERS[dtype]) * count_values(dims)
    return ColumnData(name=name, encoding="packed", size_bytes=size, dtype=dtype, dims=tuple(dims))


def values_column(name: str) -> ColumnData:
    return ColumnData(name=name, encoding="values", size_bytes=0)


def count_values(dims: Sequence[int]) -> int:
    count = 1
    for size in dims:
        count *= size
    return count


class Rows:
    """Rows of one request. `columns` has the bytes of each column: packed numbers, or values in msgpack one after the
    other. Of IPC it has the stream."""

    __slots__ = ("columns", "layout", "num_rows")

    def __init__(self, layout: Layout, num_rows: int, columns: Sequence[Buffer]) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.columns = columns

    @property
    def size_bytes(self) -> int:
        return sum(len(column) for column in self.columns)

    def slice(self, start: int, stop: int) -> "Rows":
        """Some of them."""
        if self.layout.is_ipc:
            from gen_worker.inference.front.formats.arrow_rows import slice_stream

            return Rows(IPC, stop - start, (slice_stream(self.columns[0], start, stop),))
        columns: list[Buffer] = []
        for column, data in zip(self.layout.columns, self.columns, strict=True):
            if column.encoding == "packed":
                columns.append(data[start * column.size_bytes : stop * column.size_bytes])
            else:
                values = _split_values(b"".join((_list_head(self.num_rows), data)))
                columns.append(b"".join(values[start:stop]))
        return Rows(self.layout, stop - start, columns)

    def encode(self) -> tuple[Part, list[Buffer]]:
        return join_rows([self])


def join_rows(several: Sequence[Rows]) -> tuple[Part, list[Buffer]]:
    """One part of all these rows, which have the same layout, and its payload."""
    first = several[0]
    if first.layout.is_ipc:
        assert len(several) == 1
        size = first.size_bytes
        return Part(num_rows=first.num_rows, encoding="ipc", size_bytes=size, answer="ipc"), [*first.columns]
    num_rows = sum([rows.num_rows for rows in several])
    columns: list[ColumnData] = []
    payload: list[Buffer] = []
    for position, column in enumerate(first.layout.columns):
        pieces = [rows.columns[position] for rows in several]
        if column.encoding == "values":
            pieces.insert(0, _list_head(num_rows))
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        columns.append(
            ColumnData(
                name=column.name,
                encoding=column.encoding,
                size_bytes=len(data),
                dtype=column.dtype,
                dims=column.dims,
            )
        )
        payload.append(data)
    return Part(num_rows=num_rows, columns=tuple(columns)), payload


def rows_of_part(part: Part, payload: Sequence[Buffer]) -> Rows:
    """What `join_rows` made, as rows again."""
    if part.encoding == "ipc":
        return Rows(IPC, part.num_rows, (b"".join(payload),))
    block = AnswerBlock(part, memoryview(b"".join(payload)))
    return block.rows()


def _list_head(count: int) -> bytes:
    """How msgpack begins a list of so many values."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return struct.pack(">BH", 0xDC, count)
    return struct.pack(">BI", 0xDD, count)


class AnswerBlock:
    """The answer to one part: the rows of one or several requests. ValueError where its sizes do not fit."""

    def __init__(self, part: Part, payload: memoryview) -> None:
        if part.payload_bytes != len(payload):
            raise ValueError(f"an answer of {len(payload)} bytes says that it has {part.payload_bytes}")
        self.part = part
        self.payload = payload
        self._columns: dict[str, list[Any]] | None = None

    def check(self) -> None:
        """ValueError where it cannot be read, or has another number of values than rows."""
        if self.part.encoding == "columns":
            try:
                _ = self.columns
            except (TypeError, struct.error, msgspec.MsgspecError) as fault:
                raise ValueError(f"its columns cannot be read: {fault}") from fault

    @property
    def columns(self) -> dict[str, list[Any]]:
        """One Python value for each row."""
        if self._columns is None:
            self._columns = self._read()
        return self._columns

    def _read(self) -> dict[str, list[Any]]:
        assert self.part.encoding == "columns"
        found: dict[str, list[Any]] = {}
        start = 0
        for column in self.part.columns:
            data = self.payload[start : start + column.size_bytes]
            start += column.size_bytes
            if column.encoding == "packed":
                values = unpack(data, column, self.part.num_rows)
            else:
                values = _decode_values(data)
            if not isinstance(values, list) or len(values) != self.part.num_rows:
                raise ValueError(f"the column {column.name} has another number of values than rows")
            found[column.name] = values
        return found

    def slice(self, start: int, stop: int) -> tuple[Part, bytes]:
        """Some of its rows as a part of their own, and its payload."""
        part, payload = self.part, bytes(self.payload)
        if start == 0 and stop == part.num_rows:
            return part, payload
        sliced, pieces = self.rows().slice(start, stop).encode()
        return sliced, b"".join(pieces)

    def rows(self) -> Rows:
        """The same, as what can be sliced and joined."""
        if self.part.encoding == "ipc":
            return Rows(IPC, self.part.num_rows, (self.payload,))
        columns: list[ColumnData] = []
        data: list[Buffer] = []
        start = 0
        for column in self.part.columns:
            body = self.payload[start : start + column.size_bytes]
            start += column.size_bytes
            if column.encoding == "values":
                columns.append(values_column(column.name))
                body = body[len(_list_head(self.part.num_rows)) :]
            else:
                columns.append(packed_column(column.name, column.dtype, column.dims))
            data.append(body)
        return Rows(Layout(columns=tuple(columns)), self.part.num_rows, data)


def unpack(data: Buffer, column: ColumnData, num_rows: int) -> list[Any]:
    """Packed numbers as one Python value for each row: a number, or lists of them."""
    letter = LETTERS.get(column.dtype)
    if letter is None:
        raise ValueError(f"the column {column.name} has the type {column.dtype!r}")
    width = count_values(column.dims)
    if letter == "e":  # memoryview does not know it
        flat: list[Any] = list(_floats16(num_rows * width).unpack(data))
        return nest(flat, (num_rows, *column.dims))
    view = memoryview(data)
    if not column.dims:
        return view.cast(letter).tolist()  # type: ignore[call-overload, no-any-return]
    if 0 in column.dims or num_rows == 0:
        return nest([], (num_rows, *column.dims))
    return view.cast(letter, (num_rows, *column.dims)).tolist()  # type: ignore[call-overload, no-any-return]


@cache
def _floats16(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}e")


def nest(flat: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Values one after the other -> lists of that shape."""
    if len(shape) == 1:
        return list(flat)
    size = count_values(shape[1:])
    return [nest(flat[index * size : (index + 1) * size], shape[1:]) for index in range(shape[0])]


class Answer:
    """What a request gets: its rows in one or several blocks, and what computed them."""

    __slots__ = ("compute_ms", "facts", "pieces", "shape")

    def __init__(
        self,
        pieces: Sequence[tuple[AnswerBlock, int, int]],
        *,
        facts: VersionFacts,
        shape: int,
        compute_ms: float,
    ) -> None:
        self.pieces = pieces  # (block, first row, end)
        self.facts = facts
        self.shape = shape  # of the batch, with its padding
        self.compute_ms = compute_ms

    @property
    def num_rows(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)

    def columns(self) -> dict[str, list[Any]]:
        """One Python value for each row. Not of an answer in IPC."""
        block, start, stop = self.pieces[0]
        if len(self.pieces) == 1:
            return {name: values[start:stop] for name, values in block.columns.items()}
        return {
            name: list(
                chain.from_iterable(
                    islice(block.columns[name], start, stop) for block, start, stop in self.pieces
                )
            )
            for name in block.columns
        }

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each row. Not of an answer in IPC."""
        found: list[dict[str, Any]] = []
        for block, start, stop in self.pieces:
            columns = block.columns
            if len(columns) == 1:
                ((name, values),) = columns.items()
                for value in values[start:stop]:
                    found.append({name: value})  # most have one row: a comprehension is one call more
            else:
                names = tuple(columns)
                found += [
                    dict(zip(names, values, strict=True))
                    for values in islice(zip(*columns.values(), strict=True), start, stop)
                ]
        return found
