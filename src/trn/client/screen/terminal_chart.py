"""A curve at a terminal, in braille dots: two by four a character."""

import math
from collections.abc import Sequence
from itertools import pairwise

from trn.client.screen.figures import show_number

MIN_WIDTH = 8
_LEVELS, _BARE_LEVELS = "▁▂▃▄▅▆▇█", "_.-=*#"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row, then by column


def draw_chart(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    width: int,
    height: int = 8,
    is_unicode: bool = True,
    seams: Sequence[int] = (),
) -> list[str]:
    """Lines of at most `width` characters, max at the top; none if there are no points. NaN and infinity leave a gap.

    A seam is a step after which the points are of another run: a dotted line, and a mark on the axis.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not points:
        return []
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [show_number(high), show_number(low)]
    margin = max(map(len, labels)) + 1
    columns = max(width - margin - 1, MIN_WIDTH)
    wide, tall = (2, 4) if is_unicode else (1, 1)
    dots = _plot(points, columns * wide, height * tall, low, high)
    begin, span = points[0][0], max(points[-1][0] - points[0][0], 1)
    marks = {round((step - begin) / span * (columns - 1)) for step in seams if 0 <= step - begin <= span}
    lines = []
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        cells = [_cell(dots, column, row, is_unicode=is_unicode) for column in range(columns)]
        for column in marks:
            if cells[column] == " ":
                cells[column] = "┊" if is_unicode else ":"
        lines.append(f"{label:>{margin - 1}} {'│' if is_unicode else '|'}{''.join(cells)}".rstrip())
    first, last = str(points[0][0]), str(points[-1][0])
    gap = max(columns - len(first) - len(last), 1)
    axis = list(f"{first}{' ' * gap}{last}")
    for column in marks:
        if axis[column] == " ":
            axis[column] = "┴" if is_unicode else "^"
    lines.append(f"{'':{margin}}{'└' if is_unicode else '+'}{''.join(axis)}")
    return lines


def draw_sparkline(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    width: int,
    seams: Sequence[int] = (),
    is_unicode: bool = True,
) -> str:
    """One line: the last value of each of `width` equal stretches of steps, and a mark for each seam between two."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not points:
        return ""
    begin, span = points[0][0], max(points[-1][0] - points[0][0], 1)
    low, high = min(value for _, value in points), max(value for _, value in points)
    levels = _LEVELS if is_unicode else _BARE_LEVELS
    cells: dict[int, str] = {}
    for step, value in points:
        part = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        cells[min((step - begin) * width // span, width - 1)] = levels[round(part * (len(levels) - 1))]
    shown: list[str] = []
    for column in range(width):
        shown.append(cells.get(column) or (shown[-1] if shown else " "))
    for step in sorted({step for step in seams if 0 < step - begin < span}, reverse=True):
        shown.insert(min((step - begin) * width // span, width - 1) + 1, "┊" if is_unicode else "|")
    return "".join(shown).rstrip()


def _plot(
    points: Sequence[tuple[int, float]], wide: int, tall: int, low: float, high: float
) -> set[tuple[int, int]]:
    """The dots of the line through the points, (column, row) from the top left."""
    first, last = points[0][0], points[-1][0]
    span, rise = max(last - first, 1), high - low

    def place(step: int, value: float) -> tuple[int, int]:
        # Halved first: the difference of two huge numbers may be too large for one.
        part = (value / 2 - low / 2) / (high / 2 - low / 2) if rise > 0 else 0.5
        return round((step - first) / span * (wide - 1)), round((1 - part) * (tall - 1))

    places = [place(step, value) for step, value in points]
    dots = set(places)
    for (left, top), (right, bottom) in pairwise(places):
        num = max(abs(right - left), abs(bottom - top))
        dots |= {
            (round(left + (right - left) * part / num), round(top + (bottom - top) * part / num))
            for part in range(1, num)
        }
    return dots


def _cell(dots: set[tuple[int, int]], column: int, row: int, *, is_unicode: bool) -> str:
    if not is_unicode:
        return "*" if (column, row) in dots else " "
    bits = sum(
        bit
        for down, pair in enumerate(_DOTS)
        for across, bit in enumerate(pair)
        if (column * 2 + across, row * 4 + down) in dots
    )
    return chr(0x2800 + bits) if bits else " "
