"""Using what a feed delivers, the same way for every side; and this process' resident memory."""

from pathlib import Path
from typing import Any

import numpy as np


def read_record_batch(batch: Any) -> int:
    """Read every value of a record batch: all of x, all labels, all bytes of the captions."""
    _read_x(batch.column("x"))
    _read_label(batch.column("label"))
    _read_caption(batch.column("caption"))
    return int(batch.num_rows)


def read_table(table: Any) -> int:
    """The same for a table, chunk by chunk."""
    for chunk in table.column("x").chunks:
        _read_x(chunk)
    for chunk in table.column("label").chunks:
        _read_label(chunk)
    for chunk in table.column("caption").chunks:
        _read_caption(chunk)
    return int(table.num_rows)


def _read_x(column: Any) -> None:
    column.flatten().to_numpy(zero_copy_only=True).sum()


def _read_label(column: Any) -> None:
    column.to_numpy(zero_copy_only=True).sum()


def _read_caption(column: Any) -> None:
    _, offsets, data = column.buffers()
    offset_type = np.int64 if str(column.type).startswith("large") else np.int32
    ends = np.frombuffer(offsets, offset_type, len(column) + 1, column.offset * offset_type().itemsize)
    first, last = int(ends[0]), int(ends[-1])
    np.frombuffer(data, np.uint8, last - first, first).max()


def resident_mb(*, reset_peak: bool = False) -> float:
    """Resident set now; with `reset_peak`, `peak_mb` starts from here."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmRSS:")


def peak_mb() -> float:
    return _status_mb("VmHWM:")


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
