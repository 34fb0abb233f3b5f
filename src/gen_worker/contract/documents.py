"""Documents: JSON, YAML or TOML text -> plain data, or one SpecError with place and fault; never another exception.

Plain data is what JSON can hold: None, bool, int (64 bits), finite float, str, list, and dict with str keys.
`document_schema` makes records of it.

YAML scalars follow the core schema of YAML 1.2: `1e-4` is a number, `no` and `12:30` are text.
"""

import math
import re
import reprlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal

from gen_worker.errors import SpecError

Format = Literal["json", "yaml", "toml"]
Steps = tuple[str | int, ...]

# Seconds of parsing at most: YAML and TOML are read in Python, hence their smaller bound.
MAX_CHARS: dict[Format, int] = {"json": 4 << 20, "yaml": 1 << 20, "toml": 1 << 20}
# What a document may hold once aliases are expanded: one per value, one per character of text.
MAX_EXPANDED_SIZE = 4 << 20
MAX_DEPTH = 64
MAX_FAULTS_SHOWN = 50
_MAX_SHOWN_CHARS = 60
_UNREADABLE = re.compile("[\x00\ud800-\udfff]")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)", re.IGNORECASE)
_FORMAT_BY_SUFFIX: dict[str, Format] = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def read_document(path: str | Path) -> object:
    """Plain data of a file: .yaml, .yml, .toml, else JSON."""
    path = Path(path)
    source = str(path)
    format_ = _FORMAT_BY_SUFFIX.get(path.suffix.lower(), "json")
    try:
        with path.open("rb") as file:
            # A character has at most four bytes: more than this cannot pass the bound on the text.
            content = file.read(4 * MAX_CHARS[format_] + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(source, [f"cannot be read: {reason}"]) from error
    content = content.removeprefix(BOM_UTF8)  # the codec for that would be imported anew by each worker
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        found = f"byte 0x{content[error.start]:02x}"
        raise SpecError(
            source, [f"line {line}, column {column}: found {found}, expected UTF-8 text"]
        ) from error
    return parse_document(text, format_=format_, source=source)


def parse_document(text: str, *, format_: Format, source: str) -> object:
    """Plain data of a text, or a SpecError that names `source`."""
    limit = MAX_CHARS[format_]
    if len(text) > limit:
        raise SpecError(
            source, [f"found {len(text)} characters, expected at most {limit} in {format_.upper()}"]
        )
    if bad := _unreadable(text):
        where = _line_and_column(text, bad[0])
        raise SpecError(source, [f"{where}: found {bad[1]}, which no document may hold"])
    if not text.strip():
        raise SpecError(
            source, [f"the document is empty, expected {format_.upper()} with at least one field"]
        )
    try:
        data = _PARSERS[format_](text)
    except _SyntaxFaultError as fault:
        raise SpecError(source, [str(fault)]) from fault.__cause__
    except RecursionError as error:
        raise SpecError(source, [f"nested deeper than {MAX_DEPTH} levels"]) from error
    require_plain(data, source=source)
    return data


def require_plain(data: object, *, source: str) -> None:
    """SpecError with everything in `data` that is not plain, also for cycles and alias bombs."""
    faults = [f"{path}: {text}" for path, text in _not_plain(data)]
    if faults:
        raise SpecError(source, shorten_faults(faults))


def encode_document(data: object, *, source: str) -> bytes:
    """`data` as JSON, or a SpecError with everything in it that JSON cannot hold.

    The encoder alone would change values: NaN to null, bytes to base64 text, sets to lists, a key 1 to "1".
    """
    import msgspec

    require_plain(data, source=source)
    return msgspec.json.encode(data, enc_hook=_to_base_type)


def parse_value(text: str, *, source: str) -> object:
    """The value of a `key=value` on a command line: JSON, or the text itself where it is not JSON.

    A SpecError where it is JSON that is no plain data, or spells a number that JSON does not have.
    """
    import json

    if _NOT_FINITE.fullmatch(text.strip()):
        shown = text.strip()
        raise SpecError(
            source, [f"found {shown}, expected a finite number: text is written in quotes, '\"{shown}\"'"]
        )
    try:
        value = json.loads(text, object_pairs_hook=_object_of_pairs, parse_int=_read_int)
    except (json.JSONDecodeError, RecursionError):
        value = text
    require_plain(value, source=source)
    return value


def shorten_faults(faults: list[str]) -> list[str]:
    if len(faults) <= MAX_FAULTS_SHOWN:
        return faults
    return [*faults[:MAX_FAULTS_SHOWN], f"and {len(faults) - MAX_FAULTS_SHOWN} more"]


def render_path(steps: Steps) -> str:
    """`dataset.parquet_paths[0]`; the top is `(document)`."""
    text = ""
    for step in steps:
        if isinstance(step, int):
            text += f"[{step}]"
        elif isinstance(step, str) and re.fullmatch(r"[\w/-]+", step):
            text += f".{step}" if text else step
        else:
            text += f"[{render_value(step)}]"
    return text or "(document)"


def render_value(value: object) -> str:
    """The value as JSON would show it, shortened."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            shown = _cut(value)
            if not shown.isprintable():
                shown = shown.encode("unicode_escape").decode("ascii")
            return f'"{shown}"'
        case int() if -(2**63) <= value < 2**64:
            return str(value)
        case int():
            return f"a whole number of {value.bit_length()} bits"
        case float():
            return repr(value)
        case list() | tuple():
            return "an empty list" if not value else f"a list of {len(value)}"
        case dict():
            names = ", ".join(str(key) for key in list(value)[:4])
            more = ", …" if len(value) > 4 else ""
            return f"an object with {_cut(names)}{more}" if value else "an empty object"
        case bytes() | bytearray() | set() | frozenset() | complex():
            return f"{type(value).__name__} {_cut(reprlib.repr(value))}"
        case _:
            return f"a {type(value).__name__}"


def _to_base_type(value: object) -> object:
    """Subclasses such as numpy.float64 as their base type."""
    for base in (float, int, str):
        if isinstance(value, base):
            return base(value)
    raise NotImplementedError(type(value).__name__)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def _unreadable(text: str) -> tuple[int, str] | None:
    """(offset, description) of the first NUL or lone surrogate."""
    if text.isascii() and "\x00" not in text:
        return None
    found = _UNREADABLE.search(text)
    if not found:
        return None
    return found.start(), "a NUL byte" if found.group() == "\x00" else "half a character (a lone surrogate)"


def _line_and_column(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    return f"line {line}, column {position - text.rfind(chr(10), 0, position)}"


class _SyntaxFaultError(Exception):
    pass


class _WithRepeats(dict[str, Any]):
    """A JSON object with repeated keys; `_not_plain` reports them with their path."""

    repeated: list[str]


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    marked = _WithRepeats(plain)
    seen: set[str] = set()
    marked.repeated = list(dict.fromkeys(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return marked


def _read_int(digits: str) -> Any:
    # Python refuses thousands of digits.
    return int(digits) if len(digits) < 1000 else math.inf


def _parse_json(text: str) -> object:
    import json

    try:
        return json.loads(text, object_pairs_hook=_object_of_pairs, parse_int=_read_int)
    except json.JSONDecodeError as error:
        found = text[error.pos : error.pos + 1]
        shown = render_value(found) if found else "the end of the document"
        where = f"line {error.lineno}, column {error.colno}"
        raise _SyntaxFaultError(f"{where}: found {shown}: {_lower_first(error.msg)} (JSON)") from error


def _parse_toml(text: str) -> object:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r" \(at (.+)\)$", message)
        where, message = (at.group(1), message[: at.start()]) if at else ("the document", message)
        position = re.fullmatch(r"line (\d+), column (\d+)", where)
        shown = ""
        if position:
            lines = text.split("\n")
            rest = lines[int(position[1]) - 1][int(position[2]) - 1 :]
            shown = f"found {render_value(rest[:20])}: " if rest else "found the end of the line: "
        raise _SyntaxFaultError(f"{where}: {shown}{_lower_first(message)} (TOML)") from error
    except ValueError as error:  # numbers of thousands of digits, impossible dates
        raise _SyntaxFaultError(f"{error} (TOML)") from error


def _parse_yaml(text: str) -> object:
    from gen_worker.contract.document_yaml import YamlFaultError, build_from_yaml

    try:
        return build_from_yaml(text, max_size=MAX_EXPANDED_SIZE, max_depth=MAX_DEPTH)
    except YamlFaultError as error:
        raise _SyntaxFaultError(f"{error} (YAML)") from error.__cause__


_PARSERS = {"json": _parse_json, "toml": _parse_toml, "yaml": _parse_yaml}


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _not_plain(data: object) -> Iterator[tuple[str, str]]:
    """(path, fault), outer ones first. Iterative and bounded."""
    size = 0
    pending: list[tuple[Steps, Any]] = []
    if isinstance(data, (dict, list, tuple)):
        pending.append(((), data))
    elif fault := _scalar_fault(data):
        yield render_path(()), fault
    while pending:
        steps, container = pending.pop()
        if container and len(steps) >= MAX_DEPTH:
            yield render_path(steps[:4]) + "…", f"nested deeper than {MAX_DEPTH} levels"
            return
        if isinstance(container, dict):
            yield from _key_faults(container, steps)
            children: Iterable[tuple[Any, Any]] = container.items()
            size += sum(len(key) for key in container if isinstance(key, str))
        else:
            children = enumerate(container)
        nested: list[tuple[Steps, Any]] = []
        for step, child in children:
            if isinstance(child, (dict, list, tuple)):
                nested.append(((*steps, step), child))
            elif type(child) is not bool and child is not None and (fault := _scalar_fault(child)):
                yield render_path((*steps, step)), fault
            elif isinstance(child, str):
                size += len(child)
        pending.extend(reversed(nested))
        size += len(container) + 1
        if size > MAX_EXPANDED_SIZE:
            yield (
                render_path(()),
                f"holds more than {MAX_EXPANDED_SIZE} values and characters (aliases expanded)",
            )
            return


def _scalar_fault(value: object) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else f"found {value}, expected a finite number"
    if isinstance(value, int):
        fits = -(2**63) <= value < 2**64
        return None if fits else f"found {render_value(value)}, expected one that fits 64 bits"
    if isinstance(value, str):
        bad = _unreadable(value)
        return f"found text with {bad[1]}, which no field may hold" if bad else None
    if value is None:
        return None
    return f"found {render_value(value)}, expected a value that JSON can hold{_remedy(value)}"


def _remedy(value: object) -> str:
    if type(value).__module__ == "datetime":
        return ": put it in quotes"
    if isinstance(value, set | frozenset):
        return ": use a list"
    if isinstance(value, bytes | bytearray):
        return ": use text, or name a file"
    if isinstance(value, PurePath):
        return ": use str(path)"
    if isinstance(value, Mapping):
        return ": use dict(…)"
    if hasattr(type(value), "item"):  # of numpy, torch and their like
        return ": use .item() or .tolist()"
    return ": use .value" if isinstance(value, Enum) else ""


def _key_faults(container: dict[Any, Any], steps: Steps) -> Iterator[tuple[str, str]]:
    for key in container.repeated if isinstance(container, _WithRepeats) else ():
        yield render_path((*steps, key)), f"the key {render_value(key)} is given more than once"
    for key in container:
        if not isinstance(key, str):
            yield render_path(steps), f"found the key {render_value(key)}, expected text: put it in quotes"
        elif bad := _unreadable(key):
            yield (
                render_path(steps),
                f"found the key {render_value(key)} with {bad[1]}, which no key may hold",
            )
