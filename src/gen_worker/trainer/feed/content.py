"""Checksums of the row groups that a run read, saved with the cursor and compared on a resume.

Size, row counts and footer of a file can stay the same while its rows change. So each row group is checksummed when a
process first reads it. If it differs from the checkpoint, an error names the file. CRC-32 detects replaced files, not
attacks.

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
MAX_CHANGES = 5  # named in an error: a file that was swapped differs in each of its row groups
_UNREAD = 0  # a checksum of 0 is kept as 1
_BYTES = 4


class ContentChangedError(InputError):
    """A row group has changed since it was read. `change` describes it, without the remedy."""

    def __init__(self, place: str, before: int, now: int) -> None:
        self.change = f"{place} has changed since this run read it: checksum was {before:08x}, is {now:08x}"
        super().__init__(f"{self.change}. Restore the file and resume, or start a new run with the new data")


class GroupChecksums:
    """Checksums of one dataset by row group. Thread-safe. Only checksums of one `kind` are compared."""

    def __init__(self, num_groups: int, kind: str) -> None:
        self.kind = kind
        self._values = array("I", bytes(num_groups * _BYTES))
        self._lock = threading.Lock()

    def known(self, group: int) -> int | None:
        return self._values[group] or None

    def note(self, group: int, checksum: int, place: str) -> None:
        """Store a checksum, or compare it with the known one. ContentChangedError names `place`."""
        checksum = checksum or 1
        with self._lock:
            before = self._values[group]
            self._values[group] = before or checksum
        if before not in (_UNREAD, checksum):
            raise ContentChangedError(place, before, checksum)

    def expect(self, state: Mapping[str, Any]) -> list[int] | None:
        """Use the checksums of a checkpoint. Returns row groups that were already read and differ.

        None if its checksums are of another kind and cannot be compared.
        """
        saved = _read(state)
        if state.get("kind") != self.kind or len(saved) != len(self._values):
            return None
        differing = []
        with self._lock:
            for group, checksum in enumerate(saved):
                if checksum == _UNREAD:
                    continue
                if self._values[group] not in (_UNREAD, checksum):  # read for the cache
                    differing.append(group)
                self._values[group] = checksum
        return differing

    def forget(self) -> None:
        """Drop all checksums, to accept other data."""
        with self._lock:
            self._values = array("I", bytes(len(self._values) * _BYTES))

    def state(self) -> dict[str, str]:
        with self._lock:
            return _write(self.kind, self._values)


def cursor_error(changes: Sequence[str]) -> InputError:
    """The saved position belongs to other data."""
    head = "the data or its order changed since the checkpoint, whose position would mean other rows:"
    shown = [f"  - {change}" for change in changes[:MAX_CHANGES]]
    if len(changes) > MAX_CHANGES:
        shown.append(f"  - … and {len(changes) - MAX_CHANGES} more")
    remedy = "  Change it back to resume, or start a new run; `weights` in its job starts it from a checkpoint's weights"
    return InputError("\n".join([head, *shown, remedy]))


def merge_content(states: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """The checksums of several processes as one. InputError if two of them read different data."""
    if not states:
        return None
    kind, merged = states[0]["kind"], _read(states[0])
    for state in states[1:]:
        for group, checksum in enumerate(_read(state)):
            if merged[group] not in (_UNREAD, checksum) and checksum != _UNREAD:
                raise InputError(
                    f"two processes read different data in row group {group} of the dataset: a file changed during the"
                    " run. Restore it and resume"
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
