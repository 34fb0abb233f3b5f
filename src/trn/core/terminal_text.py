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
# Patterns are compiled on their first use: most text has nothing to look for, and a command must begin at once.
_ANY = f"[{_CONTROLS}{_NOT_C0}]"
_ANY_BUT_LINES = f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_NOT_C0}]"
_ANY_BUT_LOGS = f"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_NOT_C0}]"
_IN_JSON = f"[\x7f-\x9f{_NOT_C0}]"
_OUR_COLOURS = r"(\x1b\[[0-9;]*m)"
_ESCAPES = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b[\]PX^_]|[\x90\x9d])[^\x07\x1b\x90\x9c\x9d]*(?:\x07|\x1b\\|\x9c)|\x1b[@-Z\\-_]"
_BEGUN_ESCAPE = r"(?:\x1b|\x9b|\x9d|\x90)[^\x07\x1b\x9c]{0,63}\Z"

SHORT_LINE = 2000


def plain(text: str) -> str:
    """On one line, with a mark for each character that a terminal would obey."""
    if text.isprintable():
        return text
    return re.sub(_ANY, lambda found: " " if found[0] in "\t\n\r" else "�", text)


def clean(text: str) -> str:
    """A line without control sequences, cut where it is long. The last of what it overwrote itself with."""
    text = text[:SHORT_LINE]
    if text.isprintable():
        return text
    text = re.sub(_ESCAPES, "", text).rstrip("\r")
    return re.sub(_ANY, "", text.rpartition("\r")[2].expandtabs(8))


def without_copies(text: str) -> str:
    """An error or a frame of a traceback that names the author's file alone, not its frozen copy too."""
    return re.sub(r" \(frozen copy: [^()\n]*\)", "", text) if "(frozen copy: " in text else text


def keep_lines(text: str) -> str:
    """As many lines as it has, with a mark for each other character that a terminal would obey."""
    return text if text.isprintable() else re.sub(_ANY_BUT_LINES, "�", text)


def shield(text: str) -> str:
    """Lines as we print them: our own colours stay, and nothing else that a terminal would obey.

    The last line of defence: who shows text of others makes it `plain` or `clean` before it is painted.
    """
    if all(line.isprintable() for line in text.split("\n")):
        return text
    parts = re.split(_OUR_COLOURS, text)
    return "".join(part if at % 2 else keep_lines(part) for at, part in enumerate(parts))


def shield_json(text: str) -> str:
    """The same JSON, with what a terminal would obey as `\\uXXXX`: programs read the same values."""
    if text.isascii() and "\x7f" not in text:
        return text
    return re.sub(_IN_JSON, _as_escape, text)


def _as_escape(found: "re.Match[str]") -> str:
    code = found[0].encode("utf-16-be")
    return "".join(f"\\u{code[at : at + 2].hex()}" for at in range(0, len(code), 2))


def _without_sequences(text: str) -> str:
    return re.sub(_ANY_BUT_LOGS, "", re.sub(_ESCAPES, "", text))


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
        self._sink(_without_sequences(text).encode())

    def _pass_on(self, text: str) -> None:
        begun = re.search(_BEGUN_ESCAPE, text)
        is_begun = begun is not None and not re.match(_ESCAPES, begun[0])
        self._begun = begun[0] if is_begun and begun is not None else ""
        whole = text[: len(text) - len(self._begun)]
        self._sink(_without_sequences(whole).encode())
