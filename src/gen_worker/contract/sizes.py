"""Shared limits, and sizes as text: powers of ten, three digits."""

from typing import Annotated

import msgspec

MAX_COUNT = (1 << 53) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]  # what SQLite and a reader in JavaScript can hold
MAX_EVENT_BYTES = 1 << 20  # of a line of an event file, with its newline


def show_bytes(size_bytes: float) -> str:
    """1500 -> `1.5 kB`."""
    if size_bytes < 999.5:
        return f"{size_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size_bytes /= 1000
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
    return f"{size_bytes / 1000:,.3g} TB"
