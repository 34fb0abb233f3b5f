"""`schema.json` of a dataset folder: its columns, readable for people and programs.

Types name the data, not the Arrow layout: `string` and `large_string` are both `string`, and any list is `[null]`. Hints
(`kind: image`, `encoding`) say how to decode bytes; people add them, and a new index keeps them.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import msgspec

from gen_worker.contract.document_schema import convert_document, nearest_name
from gen_worker.contract.documents import (
    read_document,
    render_path,
    render_value,
    require_plain,
    shorten_faults,
)
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.job.spec import Name, Record
from gen_worker.errors import InputError, SpecError

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_NAME = "schema.json"
SCHEMA_VERSION: Final = "dataset_schema.v1"

Size = Annotated[int, msgspec.Meta(ge=0)]
Kind = Literal["scalar", "tensor", "list", "text", "bytes", "image", "time", "other"]
Encoding = Literal["png", "jpeg"]

_NUMBERS = (
    *("bool", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_WORDS = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "large_string": "string",
    "string_view": "string",
    "large_binary": "binary",
    "binary_view": "binary",
}
_TIMES = ("timestamp", "date", "time", "duration")


class Column(Record, frozen=True, kw_only=True, omit_defaults=True):
    """`shape` is that of one row: null for one value, `[3, 224]` for fixed sizes, `[null]` for a list."""

    name: str
    dtype: Name
    shape: list[Size | None] | None
    nullable: bool
    kind: Kind
    encoding: Encoding | None = None

    @property
    def words(self) -> str:
        """`float32[3, any] not null`"""
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape or ())
        shape = "" if self.shape is None else f"[{sizes}]"
        return self.dtype + shape + ("" if self.nullable else " not null")

    @property
    def facts(self) -> tuple[str, str, list[int | None] | None, bool]:
        """What the data must match, without hints."""
        return self.name, self.dtype, self.shape, self.nullable


class DatasetSchema(Record, frozen=True, kw_only=True, dict=True):
    """The columns in their order."""

    schema_version: Literal["dataset_schema.v1"]
    columns: list[Column]

    @classmethod
    def from_arrow(
        cls, arrow_schema: "pa.Schema", *, hints: "DatasetSchema | None" = None
    ) -> "DatasetSchema":
        """The schema, with the valid hints of an earlier one."""
        known = {column.name: column for column in hints.columns} if hints else {}
        columns = [_with_hints(_column(field), known.get(field.name)) for field in arrow_schema]
        return cls(schema_version=SCHEMA_VERSION, columns=columns)

    @classmethod
    def read(cls, path: str | Path) -> "DatasetSchema":
        """From a folder or a schema.json. InputError if it is missing, SpecError with all faults of the document."""
        path = Path(path)
        path = path / SCHEMA_NAME if path.is_dir() else path
        if not path.exists():
            raise InputError(
                f"{path}: no such file: index the folder with `DatasetIndex.build({str(path.parent)!r})`"
            )
        data = read_document(path)
        refuse_other_version(data, SCHEMA_VERSION, source=str(path))
        return convert_document(data, cls, source=str(path), more_faults=_sense_faults(data))

    @cached_property
    def digest(self) -> str:
        """Of names, types, shapes and nullability, in order, without hints."""
        facts = [self.schema_version, [column.facts for column in self.columns]]
        return hash_bytes(msgspec.json.encode(facts))

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def to_json(self) -> bytes:
        """The document; SpecError if it cannot be read back (a column name with NUL)."""
        require_plain(msgspec.to_builtins(self), source=SCHEMA_NAME)
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def check_schema(schema: DatasetSchema, arrow_schema: "pa.Schema", source: str) -> list[str]:
    """InputError with each column that is missing or has another type; returns additional columns.

    Data without nulls matches a nullable column, not the other way round.
    """
    faults = []
    found = {field.name: _column(field) for field in arrow_schema}
    for column in schema.columns:
        count = len(arrow_schema.get_all_field_indices(column.name))
        if count == 0:
            faults.append(
                f"no column {column.name!r}, expected {column.words}{_hint(column.name, list(found))}"
            )
        elif count > 1:
            faults.append(f"{count} columns are named {column.name!r}, names must be unique")
        elif not _fits(found[column.name], column):
            faults.append(f"column {column.name!r} is {found[column.name].words}, expected {column.words}")
    extra = [name for name in found if name not in schema.names]
    if faults:
        raise_input_faults(source, faults)
    return extra


def column_faults(columns: Sequence[str], names: list[str], source: str) -> list[str]:
    """Faults of a selection of columns from data with these `names`."""
    faults = [] if columns else [f"{source}: the list of columns is empty: remove it to read all"]
    for name in dict.fromkeys(columns):
        count = names.count(name)
        if count > 1:
            faults.append(f"{source}: {count} columns are named {name!r}, names must be unique")
        elif count == 0:
            faults.append(f"{source}: no column {name!r}{_hint(name, names)}")
        if list(columns).count(name) > 1:
            faults.append(f"{source}: column {name!r} is listed more than once")
    return faults


def raise_input_faults(source: str, faults: list[str], remedy: str = "") -> NoReturn:
    """One InputError, one fault per line, what to do at the end."""
    count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = [f"{source}: {count}", *(f"  - {fault}" for fault in shorten_faults(faults))]
    raise InputError("\n".join([*lines, remedy] if remedy else lines), faults=faults)


def refuse_other_version(data: object, version: str, *, source: str) -> None:
    """SpecError with this one fault: a document of another version has many."""
    found = data.get("schema_version") if isinstance(data, dict) else None
    if found != version and isinstance(data, dict):
        shown = f"found {render_value(found)}" if "schema_version" in data else "missing"
        raise SpecError(
            source,
            [
                f"schema_version: {shown}, expected {render_value(version)}. A file of another program needs another name"
            ],
        )


def _hint(name: str, names: list[str]) -> str:
    nearest = nearest_name(name, names)
    return f": did you mean {nearest!r}?" if nearest else f": it has {', '.join(names) or 'none'}"


def _fits(found: Column, expected: Column) -> bool:
    is_narrower = expected.nullable or not found.nullable
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and is_narrower


def _column(field: "pa.Field") -> Column:
    import pyarrow as pa

    shape: list[int | None] = []
    is_list = False
    data_type = field.type
    while True:
        if isinstance(data_type, pa.FixedShapeTensorType):
            axes = data_type.permutation or range(len(data_type.shape))
            shape += [data_type.shape[axis] for axis in axes]
        elif pa.types.is_fixed_size_list(data_type):
            shape.append(data_type.list_size)
        elif _is_variable_list(data_type):
            shape.append(None)
        else:
            break
        is_list = True
        data_type = data_type.value_type
    dtype = _word(data_type)
    sizes = shape if is_list else None
    return Column(
        name=field.name, dtype=dtype, shape=sizes, nullable=field.nullable, kind=_kind(dtype, sizes)
    )


def _is_variable_list(data_type: "pa.DataType") -> bool:
    from pyarrow import types

    tests = (types.is_list, types.is_large_list, types.is_list_view, types.is_large_list_view)
    return any(test(data_type) for test in tests)


def _word(data_type: "pa.DataType") -> str:
    """Arrow's name of the type, or the common name of a dtype."""
    from pyarrow import types

    if types.is_struct(data_type):
        parts = [_column(data_type.field(i)) for i in range(data_type.num_fields)]
        return f"struct<{', '.join(f'{part.name}: {part.words}' for part in parts)}>"
    return _WORDS.get(str(data_type), str(data_type))


def _kind(dtype: str, shape: Sequence[int | None] | None) -> Kind:
    if shape is not None:
        return "tensor" if dtype in _NUMBERS and None not in shape else "list"
    if dtype in _NUMBERS:
        return "scalar"
    if dtype == "string":
        return "text"
    if dtype == "binary":
        return "bytes"
    return "time" if dtype.startswith(_TIMES) else "other"


def _with_hints(column: Column, known: Column | None) -> Column:
    if known is None or column.dtype != "binary" or known.dtype != "binary":
        return column
    kind = "image" if known.kind == "image" and column.kind == "bytes" else column.kind
    return msgspec.structs.replace(column, kind=kind, encoding=known.encoding)


def _sense_faults(data: Any) -> list[str]:
    """Faults that the field types cannot express, in the valid parts of the document."""
    faults = []
    seen: set[str] = set()
    columns = data.get("columns") if isinstance(data, dict) else None
    for at, column in enumerate(columns if isinstance(columns, list) else ()):
        if not isinstance(column, dict):
            continue
        name, dtype, shape = column.get("name"), column.get("dtype"), column.get("shape")
        if isinstance(name, str):
            if name in seen:
                faults.append(f"{render_path(('columns', at, 'name'))}: {render_value(name)} is given twice")
            seen.add(name)
        if not isinstance(dtype, str) or not isinstance(shape, list | None):
            continue
        expected = _kind(dtype, shape)
        kind = column.get("kind")
        if isinstance(kind, str) and kind != expected and (kind, expected) != ("image", "bytes"):
            also = ' or "image"' if expected == "bytes" else ""
            faults.append(
                f"{render_path(('columns', at, 'kind'))}: found {render_value(kind)}, "
                f"expected {render_value(expected)}{also} for {dtype}"
            )
        if column.get("encoding") is not None and dtype != "binary":
            faults.append(
                f"{render_path(('columns', at, 'encoding'))}: only a binary column has an encoding, this is {dtype}"
            )
    return faults
