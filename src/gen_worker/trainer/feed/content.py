"""What the row groups held when a run read them: a checksum of each, saved with the cursor, compared on a resume.

Size, row counts and footer of a file can stay the same while its rows change. So each row group is checksummed the
first time that a process reads it. A checksum that differs from the one a checkpoint has is an error that names the
file. CRC-32 is meant for files that were replaced or rewritten, not for somebody who wants to hide it.

Imports no pyarrow: the state of several processes is merged where a checkpoint is saved.
"""

import base64
import binascii
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gen_worker.errors import InputError

CONTENT = "content_read"  # its name in a cursor
Note = tuple[Literal["info", "warning"], str]  # level, words
_UNREAD = 0  # a checksum of 0 is kept as 1
_BYTES = 4


class ContentChangedError(InputError):
    """A row group holds other data than when it was read before. `change` says which, without the remedy."""

    def __init__(self, place: str, before: int, now: int) -> None:
        self.change = f"{place} has changed since this run read it: checksum was {before:08x}, is {now:08x}"
        super().__init__(f"{self.change}. Restore the file and resume, or start a new run with the new data")


class GroupChecksums:
    """Of one dataset: by the number of the row group. Safe for threads.

    `kind` says what was checksummed, and how: checksums of another kind are not compared.
    """

    def __init__(self, num_groups: int, kind: str) -> None:
        self.kind = kind
        self._values = array("I", bytes(num_groups * _BYTES))
        self._lock = threading.Lock()

    def known(self, group: int) -> int | None:
        return self._values[group] or None

    def note(self, group: int, checksum: int, place: str) -> None:
        """Remember it, or compare it with what is known. ContentChangedError names `place`."""
        checksum = checksum or 1
        with self._lock:
            before = self._values[group]
            self._values[group] = before or checksum
        if before not in (_UNREAD, checksum):
            raise ContentChangedError(place, before, checksum)

    def expect(self, state: Mapping[str, Any]) -> list[int] | None:
        """Take what a checkpoint knows: row groups that were read before this call, and differ from it.

        None where its checksums are of another kind, and nothing can be compared.
        """
        saved = _read(state)
        if state.get("kind") != self.kind or len(saved) != len(self._values):
            return None
        differing = []
        with self._lock:
            for group, checksum in enumerate(saved):
                if checksum == _UNREAD:
                    continue
                if self._values[group] not in (_UNREAD, checksum):  # a cache is made of it already
                    differing.append(group)
                self._values[group] = checksum
        return differing

    def forget(self) -> None:
        """Other data is wanted: what is read from now on counts."""
        with self._lock:
            self._values = array("I", bytes(len(self._values) * _BYTES))

    def state(self) -> dict[str, str]:
        with self._lock:
            return _write(self.kind, self._values)


def cursor_error(changes: Sequence[str]) -> InputError:
    """The saved position belongs to other data."""
    head = "the data cursor does not fit this dataset: its position would name other rows"
    remedy = "  restore what changed, or start a new run with the new data"
    return InputError("\n".join([head, *(f"  - {change}" for change in changes), remedy]))


def merge_content(states: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """What several processes read, as one. InputError where two of them read different data."""
    if not states:
        return None
    kind, merged = states[0]["kind"], _read(states[0])
    for state in states[1:]:
        for group, checksum in enumerate(_read(state)):
            if merged[group] not in (_UNREAD, checksum) and checksum != _UNREAD:
                raise InputError(
                    f"two processes read different data in row group {group} of the dataset: a file changed while the"
                    " run was reading it. Put it back and resume"
                )
            merged[group] = merged[group] or checksum
    return _write(kind, merged)


def _write(kind: str, values: "array[int]") -> dict[str, str]:
    return {"kind": kind, "checksums": base64.b64encode(_little_endian(values).tobytes()).decode()}


def _read(state: Mapping[str, Any]) -> "array[int]":
    values = array("I")
    try:
        values.frombytes(base64.b64decode(str(state.get("checksums", "")), validate=True))
    except (binascii.Error, ValueError) as error:
        raise InputError(f"the checksums of the data in the checkpoint are not valid: {error}") from error
    return _little_endian(values)


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
