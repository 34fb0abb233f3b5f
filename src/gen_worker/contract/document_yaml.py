"""YAML text -> Python values, from the parser's events, without recursion.

Not PyYAML's safe loader: it drops repeated keys, its merge keys can grow exponentially, and its YAML 1.1 scalars turn
`1e-4` into text and `no` into false.
"""

import re
from typing import Any

import yaml

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_INT = re.compile(r"[-+]?[0-9]{1,1000}|0o[0-7]{1,1000}|0x[0-9a-fA-F]{1,1000}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_TEXT_TAGS = frozenset({"!", "tag:yaml.org,2002:str"})
_OPEN = object()  # an unfinished anchored value, or a missing key
_MERGE = object()  # the key `<<`


class YamlFaultError(Exception):
    """Where and what, in words."""


def build_from_yaml(text: str, *, max_size: int, max_depth: int) -> Any:
    """The one document in `text`. Aliases share their value; merge keys may copy at most `max_size` entries."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder(max_size, max_depth).build(yaml.parse(text, Loader=loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{_position(mark)}: " if mark else ""
        found = ""
        if mark:
            line = text.split("\n")[mark.line : mark.line + 1]
            rest = line[0][mark.column : mark.column + 20] if line else ""
            found = f"found {rest!r}: " if rest else "found the end of the line: "
        problem = error.problem or error.context or "not understood"
        raise YamlFaultError(f"{where}{found}{problem}") from error
    except yaml.reader.ReaderError as error:
        raise YamlFaultError(f"at offset {error.position}: {error.reason}") from error
    except (yaml.YAMLError, ValueError, UnicodeError) as error:
        raise YamlFaultError(str(error)) from error


def _position(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class _Container:
    """A list or dict that is being filled."""

    __slots__ = ("anchor", "given", "key", "merges", "value")

    def __init__(self, value: list[Any] | dict[Any, Any], anchor: str | None) -> None:
        self.value = value
        self.anchor = anchor
        self.key: Any = _OPEN  # of a dict: the key whose value comes next
        self.given: set[Any] = set()
        self.merges: list[dict[Any, Any]] = []


class _Builder:
    def __init__(self, max_size: int, max_depth: int) -> None:
        self._anchors: dict[str, Any] = {}
        self._stack: list[_Container] = []
        self._budget = max_size
        self._max_depth = max_depth

    def build(self, events: Any) -> Any:
        result: Any = None
        num_documents = 0
        for event in events:
            match event:
                case yaml.DocumentStartEvent():
                    num_documents += 1
                    if num_documents > 1:
                        raise self._fault(event, "found a second document, expected one")
                case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                    self._open(event)
                case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                    result = self._close(event)
                case yaml.ScalarEvent():
                    result = self._scalar(event)
                    if event.anchor:
                        self._anchors[event.anchor] = result
                    self._place(result, event)
                case yaml.AliasEvent():
                    self._place(self._alias(event), event)
        return result

    def _fault(self, event: Any, text: str) -> YamlFaultError:
        return YamlFaultError(f"{_position(event.start_mark)}: {text}")

    def _open(self, event: Any) -> None:
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.tag and event.tag != f"tag:yaml.org,2002:{'map' if is_mapping else 'seq'}":
            raise self._fault(
                event, f"found the tag {event.tag!r}: tags are not supported, write the value plainly"
            )
        if len(self._stack) > self._max_depth:
            raise self._fault(event, f"nested deeper than {self._max_depth} levels")
        parent = self._stack[-1] if self._stack else None
        if parent and isinstance(parent.value, dict) and parent.key is _OPEN:
            raise self._fault(event, "found a list or an object as a key, expected text")
        if event.anchor:
            self._anchors[event.anchor] = _OPEN
        self._stack.append(_Container({} if is_mapping else [], event.anchor))

    def _close(self, event: Any) -> Any:
        container = self._stack.pop()
        value = container.value
        for merged in container.merges:
            assert isinstance(value, dict)
            self._budget -= len(merged)
            if self._budget < 0:
                raise self._fault(event, "merge keys expand to more than a document may hold")
            for key, item in merged.items():
                value.setdefault(key, item)
        if container.anchor:
            self._anchors[container.anchor] = value
        self._place(value, event)
        return value

    def _place(self, value: Any, event: Any) -> None:
        """Put a finished value into the current container."""
        if not self._stack:
            return
        container = self._stack[-1]
        if isinstance(container.value, list):
            container.value.append(value)
        elif container.key is _OPEN:
            if not isinstance(value, str):
                raise self._fault(event, f"found the key {value!r}, expected text: put it in quotes")
            if value in container.given:
                raise self._fault(event, f'the key "{value}" is given more than once')
            container.given.add(value)
            is_merge = value == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]
            container.key = _MERGE if is_merge else value
        else:
            if container.key is _MERGE:
                container.merges.extend(self._mappings_to_merge(value, event))
            else:
                container.value[container.key] = value
            container.key = _OPEN

    def _mappings_to_merge(self, value: Any, event: Any) -> list[dict[Any, Any]]:
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(item, dict) for item in found):
            raise self._fault(
                event, "found something else after `<<:`, expected an object or a list of objects"
            )
        return found

    def _alias(self, event: Any) -> Any:
        value = self._anchors.get(event.anchor, _MERGE)
        if value is _MERGE:
            raise self._fault(event, f"found the alias *{event.anchor}, but no &{event.anchor} before it")
        if value is _OPEN:
            raise self._fault(event, f"the alias *{event.anchor} stands inside its own value")
        return value

    def _scalar(self, event: Any) -> Any:
        text: str = event.value
        if event.tag:
            if event.tag in _TEXT_TAGS:
                return text
            raise self._fault(
                event, f"found the tag {event.tag!r}: tags are not supported, write the value plainly"
            )
        if not event.implicit[0]:  # quoted or a block: text
            return text
        if text in _NULLS:
            return None
        if text in _BOOLS:
            return _BOOLS[text]
        if _INT.fullmatch(text):
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        return text
