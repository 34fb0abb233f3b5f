"""The width of text at a terminal: 名 takes two columns, a combining accent none."""


def cell_width(text: str) -> int:
    """In columns of the terminal."""
    return len(text) if text.isascii() else sum(map(_width, text))


def shorten(text: str, width: int) -> str:
    """Text of at most that width, with an ellipsis for what was cut off."""
    if cell_width(text) <= width:
        return text
    if text.isascii():
        return text[: max(width - 1, 0)] + "…"
    room, kept = max(width - 1, 0), ""
    for char in text:
        room -= _width(char)
        if room < 0:
            break
        kept += char
    return kept + "…"


def pad(text: str, width: int, *, to_the_right: bool = False) -> str:
    """Text padded with spaces to that width; wider text is unchanged."""
    spaces = " " * (width - cell_width(text))
    return spaces + text if to_the_right else text + spaces


def wrap(text: str, width: int, *, indent: int = 0) -> list[str]:
    """Lines of at most that width, wrapped between words; all but the first are indented.

    Text in backticks is one word, so that it can be copied. A word that is longer than a line is not cut.
    """
    import re

    lines = [""]
    for gap, word in re.findall(r"( *)((?:`[^`]*`|[^ ])+)", text):
        if lines[-1] and cell_width(lines[-1] + gap + word) > width >= indent + cell_width(word):
            lines.append(" " * indent + word)
        else:
            lines[-1] += gap + word
    return lines


def _width(char: str) -> int:
    if char.isascii():
        return 1
    import unicodedata  # loaded only where it is needed

    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
