"""An event as a line of at most `MAX_EVENT_BYTES`, the limit of every reader.

Longer events are cut in their longest fields, whose names are in `cut`. The log gets the whole text.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gen_worker.contract.sizes import MAX_EVENT_BYTES

MAX_NAMES = 1000  # of metrics in one event; more are several events
MAX_NAMES_CHARS = MAX_EVENT_BYTES // 8  # of these together: a character may take several bytes

_encode = msgspec.json.Encoder().encode


class EventLine:
    """One event before it has its `seq`, which is a place in `head`. `on_cut` is called with a line that was cut."""

    __slots__ = ("_fields", "_head", "_on_cut", "whole")

    def __init__(
        self, head: dict[str, Any], fields: Mapping[str, Any], on_cut: Callable[["EventLine"], None]
    ) -> None:
        self._head = head
        self._fields = fields
        self._on_cut = on_cut
        self.whole: dict[str, Any] = {}  # the uncut values of fields that were cut

    @property
    def event(self) -> str:
        return str(self._head["event"])

    def encode(self, seq: int, max_bytes: int = MAX_EVENT_BYTES) -> bytes:
        """With its newline, at most `max_bytes` long."""
        self._head["seq"] = seq
        event = {**self._head, **self._fields}
        try:
            line = _encode(event) + b"\n"
        except UnicodeEncodeError:
            line = _json(event) + b"\n"
        return line if len(line) <= max_bytes else self._cut(line, max_bytes)

    def _cut(self, line: bytes, max_bytes: int) -> bytes:
        fields = dict(self._fields)
        sizes = {name: len(_json(value)) for name, value in fields.items()}
        excess = len(line) - max_bytes + _NAMES_ROOM
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            if excess <= 0:
                break
            self.whole[name] = fields[name]
            fields[name] = _shorten(fields[name], max(sizes[name] - excess, 0))
            excess -= sizes[name] - len(_json(fields[name]))
        self._on_cut(self)
        return _json({**self._head, **fields, "cut": list(self.whole)[:_MAX_CUT]}) + b"\n"


_MAX_CUT = 8
_NAMES_ROOM = 512  # for `cut` itself


def _shorten(value: Any, max_bytes: int) -> Any:
    """The beginning of a text, with a mark, in at most `max_bytes` of JSON; None for other values."""
    if not isinstance(value, str):
        return None
    mark = f" … [cut: {len(value)} characters in all; the log has the whole text]"
    room = max_bytes - len(_json(mark))
    if room <= 0:
        return None
    kept = value[:room]
    while len(_json(kept)) > room:  # a character may take up to twelve bytes
        kept = kept[: len(kept) * room // len(_json(kept))]
    return kept + mark


def _json(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:  # a file name that is not UTF-8, say
        return _encode(_writable(value))


def _writable(value: Any) -> Any:
    """With characters that UTF-8 cannot encode escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_writable(name): _writable(item) for name, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def split_values(values: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Metrics in parts that fit into one event each."""
    if len(values) <= MAX_NAMES and sum(map(len, values)) <= MAX_NAMES_CHARS:
        return (values,)
    return _parts(values)


def _parts(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    part: dict[str, Any] = {}
    num_chars = 0
    for name, value in values.items():
        if part and (len(part) == MAX_NAMES or num_chars + len(name) > MAX_NAMES_CHARS):
            yield part
            part, num_chars = {}, 0
        part[name] = value
        num_chars += len(name)
    yield part
