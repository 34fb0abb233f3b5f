"""Records <-> messages, by field name: what both have under one name is carried, the rest keeps its default.

A field `x_json` of a message is the plain data `x` of a record. An enum value is its word without the enum's prefix; one
that this release does not know is carried as `UNKNOWN_<number>`. A record without a value (None) leaves the field out.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gen_worker.contract.redaction import Secret
from gen_worker.errors import Fault
from trn.core.errors import InfeasibleError, InvalidRequestError
from trn.core.runs import RunRecord
from trn.proto import trainer_pb2 as pb

JSON = "_json"

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Convert = Callable[[Any], Any]


def to_message(record: Any, kind: type[M], *, without: str = "") -> M:
    """The message of that kind with all that the record has of it; `without` names a field that is left out."""
    names, get, others = _writers(type(record), kind)  # type: ignore[arg-type]
    found = get(record)
    values = dict(compress(zip(names, found, strict=False), found))  # what is set
    for name, attribute, convert in others:
        value = getattr(record, attribute)
        if value is not None and name != without:
            values[name] = convert(value)
    return kind(**values)


def from_message(message: Message, kind: type[T]) -> T:
    """The record of that kind with all that the message has of it."""
    return kind(**read_fields(message, kind))


def read_fields(message: Message, kind: Callable[..., Any]) -> dict[str, Any]:
    """What the message has of the fields of a record, or of the parameters of a function."""
    readers, unset = _readers(type(message), kind)  # type: ignore[arg-type]
    values = dict(unset)
    for field, value in message.ListFields():
        reader = readers.get(field.name)
        if reader is not None:
            values[reader[0]] = reader[1](value)
    return values


def run_message(record: RunRecord, *, with_config: bool = False) -> pb.Run:
    return to_message(record, pb.Run, without="" if with_config else "config_json")


def read_flat(request: pb.ResumeRunRequest) -> pb.Submission:
    """The submission of a resume from a client older than that message, which gave its fields one by one."""
    submission, names = pb.Submission(), set(pb.Submission.DESCRIPTOR.fields_by_name)
    for field, value in request.ListFields():
        if field.name in names:
            if field.is_repeated:
                getattr(submission, field.name).update(value)
            else:
                setattr(submission, field.name, value)
    return submission


def read_refusal(message: pb.Refusal) -> InvalidRequestError:
    """The error that the daemon had."""
    error = InfeasibleError if message.code == "infeasible" else InvalidRequestError
    faults = read_faults(message)
    return error(message.reason, [] if faults == [message.reason] else faults)


def read_faults(message: pb.Refusal) -> list[Fault]:
    return [
        Fault.from_data({field.name: text for field, text in fault.ListFields()}) for fault in message.faults
    ]


def state_number(state: str) -> int:
    """Its number on the wire, 0 where it has none."""
    return _number_of(pb.RunState.DESCRIPTOR, state)


def state_word(number: int) -> str:
    return _word_of(pb.RunState.DESCRIPTOR, number)


@functools.cache
def _writers(
    record: type, message: type[Message]
) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[tuple[str, str, Convert]]]:
    """Of all that both have: the fields that are taken as they are, if they are set, and what gets their values; then
    (field, attribute of the record, conversion) of the others.
    """
    plain: list[str] = []
    others: list[tuple[str, str, Convert]] = []
    for field in message.DESCRIPTOR.fields:
        data = field.name.removesuffix(JSON)
        if hasattr(record, field.name):
            convert = _writer(field)
            if convert is None and not field.has_presence:
                plain.append(field.name)
            else:
                others.append((field.name, field.name, convert or _same))
        elif data != field.name and hasattr(record, data):
            others.append((field.name, data, lambda value: msgspec.json.encode(value) if value else b""))
    get = attrgetter(*plain, "__class__", "__class__")  # with two names at least it makes a tuple
    return plain, get, others


def _writer(field: Any) -> Convert | None:
    convert: Convert
    if field.enum_type is not None:
        enum = field.enum_type
        convert = lambda word: _number_of(enum, word)  # noqa: E731
    elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
        convert = _remembering_last(GetMessageClass(field.message_type))
    else:
        return None
    return (lambda values: [convert(value) for value in values]) if field.is_repeated else convert


def _remembering_last(kind: type[Message]) -> Convert:
    """Runs in a row often share their cause or needs, as one object. A message that is given as a field is copied."""
    last: tuple[Any, Any] = (None, None)

    def convert(record: Any) -> Any:
        nonlocal last
        known, message = last
        if record is not known:
            message = to_message(record, kind)
            last = record, message
        return message

    return convert


@functools.cache
def _readers(
    message: type[Message], kind: Callable[..., Any]
) -> tuple[dict[str, tuple[str, Convert]], dict[str, Any]]:
    """Of all that both have: field -> (parameter, conversion); and the values of fields that are not set, where they are
    not the parameter's own default.
    """
    hints = get_type_hints(kind)
    fields = message.DESCRIPTOR.fields_by_name
    readers: dict[str, tuple[str, Convert]] = {}
    unset: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        field = fields.get(name) or fields.get(name + JSON)
        if field is None:
            continue
        convert = _reader(field, hints[name]) if field.name == name else _read_json
        readers[field.name] = name, convert
        value = convert(getattr(message(), field.name))
        if parameter.default is parameter.empty:
            unset[name] = value
        elif not field.has_presence and not isinstance(value, dict) and value != parameter.default:
            unset[name] = value  # 0 on the wire is 0, also if the default here is another
    return readers, unset


def _reader(field: Any, hint: Any) -> Convert:
    convert: Convert
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if Secret in _types(hint):
            return lambda values: {name: Secret(value) for name, value in values.items()}
        return dict
    if field.enum_type is not None:
        enum = field.enum_type
        convert = lambda number: _word_of(enum, number)  # noqa: E731
    elif field.message_type is not None:
        kind = next(
            found for found in _types(hint) if issubclass(found, msgspec.Struct) or is_dataclass(found)
        )
        convert = lambda message: from_message(message, kind)  # noqa: E731
    else:
        return tuple if field.is_repeated else _same
    return (lambda values: tuple(convert(value) for value in values)) if field.is_repeated else convert


def _types(hint: Any) -> Iterator[type]:
    """The classes in an annotation: `tuple[Run, ...]` has Run."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from _types(part)


def _same(value: Any) -> Any:
    return value


def _read_json(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


@functools.cache
def _numbers(enum: Any) -> dict[str, int]:
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return {value.name.removeprefix(prefix): value.number for value in enum.values}


@functools.cache
def _words(enum: Any) -> dict[int, str]:
    return {number: word for word, number in _numbers(enum).items()}


def _word_of(enum: Any, number: int) -> str:
    return _words(enum).get(number) or f"UNKNOWN_{number}"


def _number_of(enum: Any, word: str) -> int:
    """Also of a word that was made for a number without a name; 0 where there is none."""
    known = _numbers(enum).get(word)
    if known is not None:
        return known
    head, _, number = word.partition("_")
    return int(number) if head == "UNKNOWN" and number.isdigit() and int(number) < 1 << 31 else 0
