"""What stands on a terminal after everything that was written to it: as much of one as `trn` makes use of."""

import re

from trn.client.screen.cells import cell_width

CONTROL = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class VirtualScreen:
    """A terminal of so many columns that never scrolls away what was on it."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0
        self._rest = ""

    @property
    def lines(self) -> list[str]:
        """Without the empty ones at the end."""
        return "\n".join("".join(row).rstrip() for row in self._rows).rstrip("\n").split("\n")

    def write(self, text: str) -> None:
        text = self._rest + text
        self._rest = ""
        while text:
            found = CONTROL.match(text)
            if found:
                self._control(found[3], found[2] if not found[1] else "")
                text = text[found.end() :]
            elif text[0] == "\x1b" and len(text) < 12:
                self._rest, text = text, ""  # the other half comes with the next write
            else:
                assert text[0] != "\x1b", f"a control that no screen of ours uses: {text[:12]!r}"
                self._put(text[0])
                text = text[1:]

    def _control(self, name: str, number: str) -> None:
        if name == "A":
            self._row = max(self._row - int(number or 1), 0)
        elif name == "K":
            del self._rows[self._row][0 if number == "2" else self._column :]
        elif name == "J":
            del self._rows[self._row][self._column :], self._rows[self._row + 1 :]
        else:
            assert name in "mhl", f"a control that no screen of ours uses: {number}{name}"

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._down()
        else:
            width = cell_width(char)
            if self._column + width > self._columns:
                self._down()
                self._column = 0
            row = self._rows[self._row]
            row += [" "] * (self._column - len(row))
            row[self._column : self._column + width] = [char, *[""] * (width - 1)]
            self._column += width

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
