"""A `repr` that fits a screen, for notebooks and debuggers."""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import msgspec

from gen_worker.contract.record_fields import record_fields

MAX_LINES = 20
MAX_COLUMNS = 100


class Verbatim(str):
    """Text that a repr shows without quotes."""

    __slots__ = ()


def name_some(names: Sequence[str], limit: int = 5, separator: str = ", ") -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def screen_repr(owner: object, fields: Mapping[str, object]) -> str:
    """`Name(a=1, b='x')`, on one line where that fits, else one field a line. Long values are cut."""
    name = type(owner).__name__
    parts = [f"{key}={_shorten.repr(value)}" for key, value in fields.items()]
    line = f"{name}({', '.join(parts)})"
    if len(line) <= MAX_COLUMNS:
        return line
    lines = [_cut(f"  {part},") for part in parts]
    room = MAX_LINES - 2
    if len(lines) > room:
        lines = [*lines[: room - 1], f"  … {len(lines) - room + 1} more fields"]
    return "\n".join([f"{name}(", *lines, ")"])


def struct_repr(owner: msgspec.Struct) -> str:
    """`screen_repr` of the fields that are not at their defaults."""
    return screen_repr(owner, {field.name: value for field, value in changed_fields(owner)})


def changed_fields(owner: msgspec.Struct) -> Iterator[tuple[msgspec.structs.FieldInfo, Any]]:
    """(field, value) of the fields that are not at their defaults."""
    for field in record_fields(type(owner)):
        value = getattr(owner, field.name)
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        if default is msgspec.NODEFAULT or value != default:
            yield field, value


class _Shorten(reprlib.Repr):
    """Numbers, text and containers of them, shortened; of other values only the type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = 6
        self.maxstring = self.maxother = 80

    def repr_instance(self, x: object, level: int) -> str:  # noqa: ARG002
        if isinstance(x, PurePath):
            return repr(str(x))
        if isinstance(x, str | bytes | bool | int | float | complex | Enum | None):
            return repr(x)
        if isinstance(x, msgspec.Struct):
            return " ".join(repr(x).split())
        return f"<{type(x).__name__}>"

    def repr_Verbatim(self, x: Verbatim, level: int) -> str:  # noqa: N802, ARG002  (reprlib looks for the type's name)
        return str(x)


_shorten = _Shorten()


def _cut(line: str) -> str:
    return line if len(line) <= MAX_COLUMNS else f"{line[: MAX_COLUMNS - 2]}…,"
