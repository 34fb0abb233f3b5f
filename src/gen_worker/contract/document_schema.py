"""Plain data -> records, with every fault at once.

msgspec stops at the first fault and accepts 3.0 for an int. The fields, defaults and constraints are read from the
msgspec Structs, so there is one description of a document.
"""

import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from gen_worker.contract.documents import (
    MAX_FAULTS_SHOWN,
    Steps,
    render_path,
    render_value,
    require_plain,
    shorten_faults,
)
from gen_worker.contract.record_fields import record_fields
from gen_worker.errors import Fault, SpecError

T = TypeVar("T", bound=msgspec.Struct)

_FAULTY: Any = object()
_KIND_WORDS: dict[Any, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_MAX_LISTED_FIELDS = 12


def convert_document(
    data: object, record: type[T], *, source: str, at: Steps = (), more_faults: Sequence[str] = ()
) -> T:
    """A `record` made of plain `data`, or one SpecError with all faults (`more_faults` joins them at the end).

    `at` is the path of `data` in its document.
    """
    require_plain(data, source=source)
    reader = _Reader(record)
    value = reader.read(data, record, at)
    faults = [*reader.faults, *more_faults]
    if faults:
        raise SpecError(source, shorten_faults(faults))
    assert isinstance(value, record)
    return value


def nearest_name(name: str, names: list[str]) -> str | None:
    """The most similar of `names`."""
    import difflib

    by_folded = {known.lower().replace("-", "_"): known for known in names}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), by_folded, n=1, cutoff=0.7)
    return by_folded[found[0]] if found else None


def with_intended_names(data: dict[str, Any], record: type[msgspec.Struct]) -> dict[str, Any]:
    """`data` with misspelt fields under their likely names, so that one typo gives one fault."""
    fields = {field.encode_name: field.type for field in record_fields(record)}
    absent = [name for name in fields if name not in data]
    if len(data) > len(fields) + MAX_FAULTS_SHOWN:
        return data
    intended: dict[str, Any] = {}
    for key, value in data.items():
        name = key if key in fields else nearest_name(key, absent) or key
        for part in _structs_in(fields.get(name)) if isinstance(value, dict) else ():
            value = with_intended_names(value, part)  # noqa: PLW2901
        intended[name] = value
    return intended


class _Reader:
    def __init__(self, root: type[msgspec.Struct]) -> None:
        self.faults: list[str] = []
        self._root = root

    def read(self, value: Any, type_: Any, steps: Steps, meta: msgspec.Meta | None = None) -> Any:
        """The converted value, or `_FAULTY` with at least one fault noted."""
        origin = get_origin(type_)
        if origin is Annotated:
            inner, *metas = get_args(type_)
            return self.read(
                value, inner, steps, next((m for m in metas if isinstance(m, msgspec.Meta)), meta)
            )
        if type_ is Any:
            return value
        if origin in (Union, types.UnionType):
            return self._read_union(value, type_, steps)
        if origin is list:
            return self._read_list(value, get_args(type_)[0], steps, type_, meta)
        if origin is dict:
            return self._read_dict(value, get_args(type_), steps, type_, meta)
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            return self._read_struct(value, type_, steps)
        if not _fits_scalar(value, type_, meta):
            return self._fault(steps, value, _describe(type_, meta), hint=_hint(value, type_))
        return float(value) if type_ is float else value

    def _fault(self, steps: Steps, value: Any, expected: str, hint: str = "") -> Any:
        self.faults.append(Fault.of_value(render_path(steps), render_value(value), expected, hint))
        return _FAULTY

    def _read_union(self, value: Any, union: Any, steps: Steps) -> Any:
        members = get_args(union)
        for member in members:
            attempt = _Reader(self._root)
            converted = attempt.read(value, member, steps)
            if not attempt.faults:
                return converted
            # A list or an object fits one member only: report the faults of that one.
            if isinstance(value, (dict, list)) and _takes_kind(member, value):
                self.faults += attempt.faults
                return _FAULTY
        hint = next(filter(None, (_hint(value, member) for member in members)), "")
        return self._fault(steps, value, _describe(union, None), hint)

    def _read_list(self, value: Any, item: Any, steps: Steps, type_: Any, meta: msgspec.Meta | None) -> Any:
        if not isinstance(value, (list, tuple)) or not _fits_length(value, meta):
            hint = f" (a list of one is [{render_value(value)}])" if isinstance(value, str) else ""
            return self._fault(steps, value, _describe(type_, meta), hint)
        converted = [self.read(each, item, (*steps, index)) for index, each in enumerate(value)]
        return _FAULTY if any(each is _FAULTY for each in converted) else converted

    def _read_dict(
        self, value: Any, parts: tuple[Any, ...], steps: Steps, type_: Any, meta: msgspec.Meta | None
    ) -> Any:
        if not isinstance(value, dict) or not _fits_length(value, meta):
            return self._fault(steps, value, _describe(type_, meta))
        converted = {
            self.read(key, parts[0], (*steps, key)): self.read(each, parts[1], (*steps, key))
            for key, each in value.items()
        }
        return _FAULTY if any(_FAULTY in (key, each) for key, each in converted.items()) else converted

    def _read_struct(self, value: Any, struct: type[msgspec.Struct], steps: Steps) -> Any:
        if not isinstance(value, dict):
            return self._fault(steps, value, _describe_struct(struct))
        fields = {field.encode_name: field for field in record_fields(struct)}
        num_faults = len(self.faults)
        for key in value:
            if key not in fields and struct.__struct_config__.forbid_unknown_fields:
                free = [name for name in fields if isinstance(value.get(name), dict) and key in value[name]]
                self._unknown_field(key, list(fields), steps, free)
        converted = {}
        for name, field in fields.items():
            if name in value:
                converted[field.name] = self.read(value[name], field.type, (*steps, name))
            elif field.required:
                expected = _describe(field.type, None)
                self.faults.append(
                    Fault(
                        f"missing, expected {expected}",
                        path=render_path((*steps, name)),
                        kind="missing",
                        expected=expected,
                    )
                )
        return struct(**converted) if len(self.faults) == num_faults else _FAULTY

    def _unknown_field(self, key: str, names: list[str], steps: Steps, holders: list[str]) -> None:
        """`holders`: objects beside it that have a field of this name, such as `hyperparams`."""
        where = f"{render_path(steps)}: " if steps else ""
        text = f"{where}unknown field `{key if key.isprintable() and len(key) < 60 else render_value(key)}`"
        hint = ""
        if len(self.faults) < MAX_FAULTS_SHOWN:  # the search for names is slow
            nearest = nearest_name(key, names)
            elsewhere = [render_path((*steps, holder, key)) for holder in holders]
            elsewhere += [path for path in _paths_of_field(self._root, key) if path not in elsewhere]
            if nearest:
                hint = f"did you mean `{nearest}`?"
            elif elsewhere:
                hint = f"did you mean {' or '.join(f'`{path}`' for path in elsewhere[:3])}?"
            elif len(names) <= _MAX_LISTED_FIELDS:
                hint = f"expected one of {', '.join(names)}"
        fault = Fault(
            f"{text}: {hint}" if hint else text,
            kind="unknown-field",
            found=render_value(key),
            hint=hint,
        )
        fault.path = render_path((*steps, key))  # the sentence names the field by itself
        self.faults.append(fault)


def _paths_of_field(struct: type[msgspec.Struct], name: str, prefix: str = "") -> list[str]:
    """Other places in the document with a field of this name."""
    found = []
    for field in record_fields(struct):
        if field.encode_name == name:
            found.append(prefix + name)
        for part in _structs_in(field.type):
            found += _paths_of_field(part, name, f"{prefix}{field.encode_name}.")
    return found


def _structs_in(type_: Any) -> list[type[msgspec.Struct]]:
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return [type_]
    if get_origin(type_) in (Annotated, Union, types.UnionType):
        return [struct for part in get_args(type_) for struct in _structs_in(part)]
    return []


def _takes_kind(type_: Any, value: Any) -> bool:
    if get_origin(type_) is Annotated:
        return _takes_kind(get_args(type_)[0], value)
    if isinstance(value, list):
        return get_origin(type_) is list
    return get_origin(type_) is dict or (isinstance(type_, type) and issubclass(type_, msgspec.Struct))


def _fits_scalar(value: Any, type_: Any, meta: msgspec.Meta | None) -> bool:
    if type_ is None or type_ is types.NoneType:
        return value is None
    if get_origin(type_) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(type_))
    if type_ is float:
        # A whole number is a number; true is neither.
        return type(value) in (int, float) and _fits_bounds(value, meta)
    if type_ in (int, bool):
        return type(value) is type_ and _fits_bounds(value, meta)
    assert type_ is str, f"job documents hold no {type_}"
    return isinstance(value, str) and _fits_length(value, meta) and _fits_pattern(value, meta)


def _fits_bounds(value: float, meta: msgspec.Meta | None) -> bool:
    if meta is None:
        return True
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (meta.lt is None or value < meta.lt)
        and (meta.multiple_of is None or value % meta.multiple_of == 0)
    )


def _fits_length(value: Any, meta: msgspec.Meta | None) -> bool:
    if meta is None:
        return True
    return (meta.min_length or 0) <= len(value) and (meta.max_length is None or len(value) <= meta.max_length)


def _fits_pattern(value: str, meta: msgspec.Meta | None) -> bool:
    return meta is None or meta.pattern is None or re.search(meta.pattern, value) is not None


def _hint(value: Any, type_: Any) -> str:
    if get_origin(type_) is Annotated:
        type_ = get_args(type_)[0]
    if get_origin(type_) is Literal and isinstance(value, str):
        nearest = nearest_name(value, [choice for choice in get_args(type_) if isinstance(choice, str)])
        return f": did you mean {render_value(nearest)}?" if nearest else ""
    if (
        type_ in (int, float)
        and isinstance(value, str)
        and re.fullmatch(r"\s*[-+]?[\d.]+([eE][-+]?\d+)?\s*", value)
    ):
        return " (without quotes)"
    return ""


def _describe(type_: Any, meta: msgspec.Meta | None) -> str:
    """The type in words: "a whole number of at least 1 or null"."""
    origin = get_origin(type_)
    if origin is Annotated:
        inner, *metas = get_args(type_)
        return _describe(inner, next((m for m in metas if isinstance(m, msgspec.Meta)), None))
    if meta is not None and meta.description:
        return meta.description
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(member, None) for member in get_args(type_))
    if origin is Literal:
        return " or ".join(render_value(choice) for choice in get_args(type_))
    if type_ is None or type_ is types.NoneType:
        return "null"
    if origin is list:
        return f"a list in which each is {_describe(get_args(type_)[0], None)}" + _describe_limits(meta)
    if origin is dict:
        return "an object" + _describe_limits(meta)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return _describe_struct(type_)
    return _KIND_WORDS.get(type_, "any value") + _describe_limits(meta)


def _describe_limits(meta: msgspec.Meta | None) -> str:
    if meta is None:
        return ""
    if meta.min_length == 1 and meta.max_length is None and meta.pattern is None:
        return " that is not empty"
    words = [
        (meta.ge, f"of at least {meta.ge}"),
        (meta.gt, f"above {meta.gt}"),
        (meta.le, f"of at most {meta.le}"),
        (meta.lt, f"below {meta.lt}"),
        (meta.multiple_of, f"that is a multiple of {meta.multiple_of}"),
        (meta.min_length, f"with a length of at least {meta.min_length}"),
        (meta.max_length, f"with a length of at most {meta.max_length}"),
        (meta.pattern, f"that matches {meta.pattern}"),
    ]
    given = [text for limit, text in words if limit is not None]
    return " " + " and ".join(given) if given else ""


def _describe_struct(struct: type[msgspec.Struct]) -> str:
    names = [field.encode_name for field in record_fields(struct)]
    shown = ", ".join(names[:_MAX_LISTED_FIELDS]) + (", …" if len(names) > _MAX_LISTED_FIELDS else "")
    return f"an object with {shown}"
