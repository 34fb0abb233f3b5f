"""Rows that end the process that computes them. They are known by a hash, and are not computed again by their version."""

import hashlib
from collections.abc import Sequence

from gen_worker.inference.front.rows import Rows

MAX_ROWS = 4096


class Quarantine:
    """Of one pool. Of too many rows, the oldest are forgotten."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, None] = {}
        self.is_empty = True  # as nearly always: not to be asked by a call

    def add(self, row: Rows) -> None:
        self._hashes[_hash_row(row)] = None
        self.is_empty = False
        while len(self._hashes) > MAX_ROWS:
            del self._hashes[next(iter(self._hashes))]

    def find(self, rows: Rows) -> Sequence[int]:
        """Which of these rows are in it."""
        return [
            index
            for index in range(rows.num_rows)
            if _hash_row(rows if rows.num_rows == 1 else rows.slice(index, index + 1)) in self._hashes
        ]


def _hash_row(rows: Rows) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, data in zip(rows.layout.names or ("",), rows.columns, strict=True):
        digest.update(name.encode() + b"\0")
        digest.update(data)
    return digest.digest()
