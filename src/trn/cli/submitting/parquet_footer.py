"""The columns of a parquet file, from the first bytes of its footer: no library that takes as long to load as a run.

A footer is a record in Thrift's compact protocol. Of it only the schema is read, which comes second; the worker reads
and judges all the rest.
"""

from pathlib import Path

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
TAIL_BYTES = 8
MAX_READ_BYTES = 1 << 20  # a schema is far smaller
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_SCHEMA, _NAME, _NUM_CHILDREN = 2, 4, 5  # numbers of the fields


class DamagedFileError(Exception):
    """No complete parquet file; says why."""


def read_columns(path: Path) -> list[str] | None:
    """The names at the top of its schema; None where they cannot be told. OSError, DamagedFileError."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        file.seek(max(size_bytes - TAIL_BYTES, 0))
        tail = file.read(TAIL_BYTES)
        if tail[4:] == ENCRYPTED:
            return None
        if size_bytes < 12 or tail[4:] != MAGIC:
            file.seek(0)
            how = "it is cut short" if file.read(4) == MAGIC else "it does not begin as one"
            raise DamagedFileError(f"not a complete parquet file ({size_bytes:,} bytes): {how}")
        footer_bytes = int.from_bytes(tail[:4], "little")
        if footer_bytes > size_bytes - 12:
            raise DamagedFileError(f"its footer claims {footer_bytes:,} of {size_bytes:,} bytes")
        file.seek(size_bytes - TAIL_BYTES - footer_bytes)
        footer = file.read(min(footer_bytes, MAX_READ_BYTES))
    try:
        return _top_names(_Compact(footer).read_schema())
    except (IndexError, ValueError, RecursionError):  # the worker's library has the last word
        return None


def _top_names(elements: list[tuple[str, int]]) -> list[str]:
    """Children of the root; `elements` are (name, number of children), each before its own children."""
    names: list[str] = []
    at = 1
    for _ in range(elements[0][1]):
        names.append(elements[at][0])
        pending = 1
        while pending:
            pending += elements[at][1] - 1
            at += 1
    return names


class _Compact:
    """A reader of Thrift's compact protocol. IndexError at the end of its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read_schema(self) -> list[tuple[str, int]]:
        field = 0
        while (header := self._byte()) != 0:
            field, kind = self._field(header, field)
            if field == _SCHEMA and kind == _LIST:
                count, _ = self._list_header()
                return [self._element() for _ in range(count)]
            self._skip(kind)
        raise ValueError("no schema")

    def _element(self) -> tuple[str, int]:
        name, num_children, field = "", 0, 0
        while (header := self._byte()) != 0:
            field, kind = self._field(header, field)
            if field == _NAME and kind == _BINARY:
                name = self._bytes(self._varint()).decode()
            elif field == _NUM_CHILDREN and kind == _I32:
                num_children = self._zigzag()
            else:
                self._skip(kind)
        return name, num_children

    def _field(self, header: int, before: int) -> tuple[int, int]:
        step = header >> 4
        return (before + step if step else self._zigzag()), header & 15

    def _skip(self, kind: int) -> None:
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self._byte()
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._bytes(8)
        elif kind == _BINARY:
            self._bytes(self._varint())
        elif kind in (_LIST, _SET):
            count, of = self._list_header()
            for _ in range(count):
                self._byte() if of in (_TRUE, _FALSE) else self._skip(of)
        elif kind == _STRUCT:
            field = 0
            while (header := self._byte()) != 0:
                field, below = self._field(header, field)
                self._skip(below)
        else:
            raise ValueError(f"a field of kind {kind}")  # a map: no schema has one

    def _list_header(self) -> tuple[int, int]:
        header = self._byte()
        return (header >> 4 if header >> 4 != 15 else self._varint()), header & 15

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise IndexError("the end of what was read")
        self._at += count
        return self._data[self._at - count : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _zigzag(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
