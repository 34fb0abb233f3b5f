"""How much room text takes at a terminal: 名 fills two columns, an accent that stands alone none."""


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
    """Text with spaces to that width, or as it is where it is wider."""
    spaces = " " * (width - cell_width(text))
    return spaces + text if to_the_right else text + spaces


def _width(char: str) -> int:
    if char.isascii():
        return 1
    import unicodedata  # loaded only where it is needed

    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
