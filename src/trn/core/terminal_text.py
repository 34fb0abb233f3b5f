"""Text of others at a terminal: without what would move its cursor, recolour it, or show words in another order.

Runs, workers, file names and error messages are written by others. A control sequence among them can hide what stands
before it; a character that turns the direction of writing can make `txt.exe` read as `exe.txt`.
"""

import codecs
import re
from collections.abc import Callable

# Control characters (C0, DEL, C1), marks and overrides of the direction, line separators, invisible tags.
_CONTROLS = "\x00-\x1f\x7f-\x9f"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_HIDDEN = "\u00ad\u180e\u200b\u2028\u2029\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_NOT_C0 = _DIRECTIONS + _HIDDEN
_ANY = re.compile(f"[{_CONTROLS}{_NOT_C0}]")
_ANY_BUT_LINES = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_NOT_C0}]")
_ANY_BUT_LOGS = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_NOT_C0}]")
_IN_JSON = re.compile(f"[\x7f-\x9f{_NOT_C0}]")
_OUR_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x9d\x90])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)|\x1b[@-Z\\-_]"
)
_BEGUN_ESCAPE = re.compile(r"(?:\x1b|\x9b|\x9d|\x90)[^\x07\x1b\x9c]{0,63}\Z")

SHORT_LINE = 2000


def plain(text: str) -> str:
    """On one line, with a mark for each character that a terminal would obey."""
    return _ANY.sub(lambda found: " " if found[0] in "\t\n\r" else "�", text)


def clean(text: str) -> str:
    """A line without control sequences, cut where it is long. The last of what it overwrote itself with."""
    text = _ESCAPES.sub("", text[:SHORT_LINE]).rstrip("\r")
    return _ANY.sub("", text.rpartition("\r")[2].expandtabs(8))


def keep_lines(text: str) -> str:
    """As many lines as it has, with a mark for each other character that a terminal would obey."""
    return _ANY_BUT_LINES.sub("�", text)


def shield(text: str) -> str:
    """Lines as we print them: our own colours stay, and nothing else that a terminal would obey.

    The last line of defence: who shows text of others makes it `plain` or `clean` before it is painted.
    """
    if not _ANY_BUT_LINES.search(text):
        return text
    parts = _OUR_COLOURS.split(text)
    return "".join(part if at % 2 else keep_lines(part) for at, part in enumerate(parts))


def shield_json(text: str) -> str:
    """The same JSON, with what a terminal would obey as `\\uXXXX`: programs read the same values."""
    return _IN_JSON.sub(_as_escape, text)


def _as_escape(found: "re.Match[str]") -> str:
    code = found[0].encode("utf-16-be")
    return "".join(f"\\u{code[at : at + 2].hex()}" for at in range(0, len(code), 2))


class LogShield:
    """Bytes of a log as they come -> bytes for a terminal: lines, tabs and carriage returns, no control sequences."""

    def __init__(self, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._begun = ""  # a control sequence whose end has not come

    def __call__(self, data: bytes) -> None:
        self._pass_on(self._begun + self._decode(data))

    def end(self) -> None:
        text, self._begun = self._begun + self._decode(b"", final=True), ""
        self._sink(_ANY_BUT_LOGS.sub("", _ESCAPES.sub("", text)).encode())

    def _pass_on(self, text: str) -> None:
        begun = _BEGUN_ESCAPE.search(text)
        is_begun = begun is not None and not _ESCAPES.match(begun[0])
        self._begun = begun[0] if is_begun and begun is not None else ""
        whole = text[: len(text) - len(self._begun)]
        self._sink(_ANY_BUT_LOGS.sub("", _ESCAPES.sub("", whole)).encode())
