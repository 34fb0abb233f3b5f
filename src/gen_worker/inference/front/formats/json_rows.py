"""`{"rows": [{"x": [...], ...}, ...]}` to columns, and answers back to JSON.

A body that fits the model's columns is decoded with one call into typed rows. One that does not is decoded again, without
types, to name all of its faults.
"""

import struct
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.refusals import Refusal, RowFault
from gen_worker.inference.front.rows import (
    LETTERS,
    Answer,
    Layout,
    Rows,
    count_values,
    packed_column,
    values_column,
)
from gen_worker.inference.messages import ColumnType

MAX_FAULTS = 100
MAX_SHOWN = 60

# What a decoder raises for a body that is not what it takes. Of a depth that Python cannot hold, the last one.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_encode_value = msgspec.msgpack.Encoder().encode
_encode_json = msgspec.json.Encoder().encode
_any_body: msgspec.json.Decoder[Any] = msgspec.json.Decoder()

_WHOLE_NUMBERS = {
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
# How one value, and several, are called in what was expected.
_KIND_WORDS = {
    "string": ("text", "texts"),
    "binary": ("bytes as base64 text", "texts of base64"),
    "bool": ("true or false", "values true or false"),
    "any": ("any value", "values of any kind"),
    **{name: (f"a whole number ({name})", f"whole numbers ({name})") for name in _WHOLE_NUMBERS},
    **{
        name: (f"a whole number from {low} to {high}", f"whole numbers from {low} to {high}")
        for name, (low, high) in _WHOLE_NUMBERS.items()
        if high < 2**16
    },
}
_LARGEST = {"float16": 65504.0, "float32": 3.4028234663852886e38, "float64": float("inf")}


class RowReader:
    """Reads the rows of requests for a model that takes these columns. Without columns, any are taken."""

    def __init__(self, inputs: Sequence[ColumnType], *, max_rows: int = sys.maxsize) -> None:
        self.inputs = tuple(inputs)
        self.max_rows = max_rows  # of a request
        self._columns = [_Column(column, f"f{index}") for index, column in enumerate(inputs)]
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self._free_layouts: dict[tuple[str, ...], Layout] = {}
        self._packers = [
            (attrgetter(each.field), each.pack)
            for each in self._columns
            if each.pack and not each.is_nullable
        ]
        self._packed_layout: Layout | None = None  # where all columns are numbers and none is nullable
        if self._columns and len(self._packers) == len(self._columns):
            self._packed_layout = self.layout((True,) * len(self._columns))
        # A nullable column may be left out.
        fields: list[Any] = [
            (each.field, each.type | None, None) if each.is_nullable else (each.field, each.type)
            for each in self._columns
        ]
        row = msgspec.defstruct(
            "Row",
            fields,
            kw_only=True,
            forbid_unknown_fields=True,
            rename={each.field: each.name for each in self._columns},
            gc=False,
        )
        body = msgspec.defstruct(
            "Body",
            [("rows", Annotated[list[row], msgspec.Meta(min_length=1)])],  # type: ignore[valid-type]
            forbid_unknown_fields=True,
            gc=False,
        )
        self._body = body
        self._decode: Callable[[Buffer], Any] = msgspec.json.Decoder(body).decode

    def read(self, body: Buffer) -> Rows:
        """Refusal with all faults where the body does not fit."""
        if not self._columns:
            return self._pack_any(_untyped_rows(read_untyped(body)))
        try:
            rows = self._decode(body).rows
            self._require_room(rows)
            return self._pack(rows)
        except (*NOT_JSON, struct.error, OverflowError):
            raise self._refuse(_untyped_rows(read_untyped(body))) from None

    def convert(self, rows: Sequence[Any]) -> Rows:
        """The same, of rows that are decoded already."""
        if not self._columns:
            return self._pack_any(rows)
        try:
            return self._pack(msgspec.convert({"rows": rows}, self._body).rows)  # type: ignore[attr-defined]
        except (msgspec.MsgspecError, struct.error, OverflowError):
            raise self._refuse(rows) from None

    def _pack(self, rows: list[Any]) -> Rows:
        if self._packed_layout is not None:
            columns: list[Buffer] = []
            for get, pack in self._packers:
                columns.append(pack([*map(get, rows)]))  # most have one row: a comprehension is one call more
            return Rows(self._packed_layout, len(rows), columns)
        packed: list[bytes] = []
        is_packed: list[bool] = []
        for column in self._columns:
            values = [getattr(row, column.field) for row in rows]
            fits = column.pack is not None and not (column.is_nullable and None in values)
            is_packed.append(fits)
            packed.append(column.pack(values) if fits else b"".join(map(_encode_value, values)))  # type: ignore[misc]
        return Rows(self.layout(tuple(is_packed)), len(rows), packed)

    def _require_room(self, rows: Sequence[Any]) -> None:
        """Before anything is done with each row."""
        if len(rows) > self.max_rows:
            raise Refusal(
                "too_large", f"the request has {len(rows)} rows, and at most {self.max_rows} can wait"
            )

    def layout(self, is_packed: tuple[bool, ...]) -> Layout:
        layout = self._layouts.get(is_packed)
        if layout is None:
            layout = self._layouts[is_packed] = Layout(
                columns=tuple(
                    packed_column(each.name, each.dtype, each.dims) if packed else values_column(each.name)
                    for each, packed in zip(self._columns, is_packed, strict=True)
                )
            )
        return layout

    def _pack_any(self, rows: Sequence[Any]) -> Rows:
        """Any columns, the same in all rows."""
        self._require_room(rows)
        names = tuple(rows[0]) if isinstance(rows[0], dict) else ()
        faults = []
        for index, row in enumerate(rows):
            if not isinstance(row, dict) or not row:
                faults.append(
                    RowFault(
                        row=index, found=_describe(row), expected="an object with a value for each column"
                    )
                )
            elif row.keys() != set(names):
                faults.append(
                    RowFault(row=index, found=_shorten(", ".join(row)), expected=_shorten(", ".join(names)))
                )
        if faults:
            raise _refusal(faults)
        layout = self._free_layouts.get(names)
        if layout is None:
            layout = Layout(columns=tuple(values_column(name) for name in names))
            if len(self._free_layouts) < 64:
                self._free_layouts[names] = layout
        return Rows(layout, len(rows), [b"".join(_encode_value(row[name]) for row in rows) for name in names])

    def _refuse(self, rows: Sequence[Any]) -> Refusal:
        """All that is wrong with rows that could not be read."""
        self._require_room(rows)
        faults: list[RowFault] = []
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                expected = "an object with a value for each column"
                faults.append(RowFault(row=index, found=_describe(row), expected=expected))
                continue
            for column in self._columns:
                faults += column.find_faults(index, row)
            names = {column.name for column in self._columns}
            known = _shorten(", ".join(sorted(names)))
            faults += [
                RowFault(
                    row=index, column=_shorten(name), found="an unknown column", expected=f"only {known}"
                )
                for name in row
                if name not in names
            ]
            if len(faults) >= MAX_FAULTS:
                break
        if not faults:  # the types refuse what the search for faults lets pass
            faults.append(
                RowFault(found="rows that cannot be read", expected="rows that fit the model's columns")
            )
        return _refusal(faults)


class _Column:
    """How the values of one column are read, and packed where they have one size."""

    def __init__(self, column: ColumnType, field: str) -> None:
        self.name = column.name
        self.field = field
        self.dtype = column.dtype
        self.is_nullable = column.is_nullable
        self.type: Any = _type_of(column)
        self._dims = column.dims
        self.pack: Callable[[list[Any]], bytes] | None = None
        self.dims: tuple[int, ...] = tuple(size for size in column.dims if size is not None)
        if column.dtype in LETTERS and None not in column.dims:
            self.pack = _packer(LETTERS[column.dtype], self.dims)

    def find_faults(self, index: int, row: dict[str, Any]) -> list[RowFault]:
        if self.name not in row:
            if self.is_nullable:
                return []
            return [RowFault(row=index, column=self.name, found="nothing", expected=self.expected)]
        value = row[self.name]
        if value is None and self.is_nullable:
            return []
        found = self._find_fault(value, self._dims)
        return (
            []
            if found is None
            else [RowFault(row=index, column=self.name, found=found, expected=self.expected)]
        )

    @property
    def expected(self) -> str:
        one, several = _KIND_WORDS.get(self.dtype, (f"a number ({self.dtype})", f"numbers ({self.dtype})"))
        if not self._dims:
            return one
        if len(self._dims) == 1:
            return f"a list of {several}" if self._dims[0] is None else f"a list of {self._dims[0]} {several}"
        return f"lists of {' × '.join('any' if size is None else str(size) for size in self._dims)} {several}"

    def _find_fault(self, value: Any, dims: Sequence[int | None]) -> str | None:
        """What was found instead of what is expected."""
        if dims:
            if not isinstance(value, list):
                return _describe(value)
            if dims[0] is not None and len(value) != dims[0]:
                return f"a list of {len(value)}"
            return next(
                (found for each in value if (found := self._find_fault(each, dims[1:])) is not None), None
            )
        try:
            msgspec.convert(value, scalar_type(self.dtype))
            if self.dtype in LETTERS:
                struct.pack("<" + LETTERS[self.dtype], value)
        except (msgspec.ValidationError, struct.error, OverflowError):
            return _describe(value)
        return None


def read_untyped(body: Buffer) -> Any:
    """Refusal where it is not JSON."""
    try:
        return _any_body.decode(body)
    except NOT_JSON as fault:
        raise refuse_body("JSON", fault) from None


def refuse_body(expected: str, fault: Exception) -> Refusal:
    why = "it is nested too deeply" if isinstance(fault, RecursionError) else str(fault)
    return Refusal("input", f"the body is not {expected}: {why}")


def _untyped_rows(document: Any) -> list[Any]:
    if not isinstance(document, dict) or set(document) != {"rows"}:
        raise Refusal("input", 'the body is not an object with "rows" and nothing else')
    rows = document["rows"]
    if not isinstance(rows, list) or not rows:
        raise Refusal("input", f'"rows" is {_describe(rows)}, expected a list of at least one row')
    return rows


def _refusal(faults: list[RowFault]) -> Refusal:
    first = faults[0]
    num_more = len(faults) - 1
    more = f" (and {num_more} more fault{'s' if num_more > 1 else ''})" if num_more else ""
    where = (
        ""
        if first.row is None
        else f"row {first.row}" + (f", column {first.column}" if first.column else "") + ": "
    )
    return Refusal(
        "input", f"{where}found {first.found}, expected {first.expected}{more}", faults=faults[:MAX_FAULTS]
    )


def scalar_type(dtype: str) -> Any:
    if dtype in _WHOLE_NUMBERS:
        low, high = _WHOLE_NUMBERS[dtype]
        return (
            int if dtype == "uint64" else Annotated[int, msgspec.Meta(ge=low, le=high)]
        )  # its end is too large
    if dtype in _LARGEST:
        return float
    return {"bool": bool, "string": str, "binary": bytes, "any": Any}[dtype]


def _type_of(column: ColumnType) -> Any:
    found = scalar_type(column.dtype)
    for size in reversed(column.dims):
        found = list[found]  # type: ignore[valid-type]
        if size is not None:
            found = Annotated[found, msgspec.Meta(min_length=size, max_length=size)]
    return found


def _packer(letter: str, dims: tuple[int, ...]) -> Callable[[list[Any]], bytes]:
    """A function from the values of all rows to bytes."""
    if not dims:

        def pack_numbers(values: list[Any]) -> bytes:
            return struct.pack(f"<{len(values)}{letter}", *values)

        return pack_numbers
    pack = struct.Struct(f"<{count_values(dims)}{letter}").pack
    if len(dims) == 1:

        def pack_lists(values: list[Any]) -> bytes:
            return pack(*values[0]) if len(values) == 1 else b"".join([pack(*value) for value in values])

        return pack_lists

    def pack_nested(values: list[Any]) -> bytes:
        flat = values
        for _ in dims[1:]:
            flat = [list(chain.from_iterable(value)) for value in flat]
        return b"".join([pack(*value) for value in flat])

    return pack_nested


def _describe(value: Any) -> str:
    """For people: what kind of value it is, and its beginning."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return _shorten(_encode_json(value).decode())


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def encode_answer(answer: Answer) -> bytes:
    """`{"rows": [{name: value}, ...]}`. A number that is not finite is null."""
    return _encode_json({"rows": answer.rows()})
