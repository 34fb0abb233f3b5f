"""Can a run's lines be written where it was asked for? Tried for real, without a trace: a mode says less than the disk."""

import os
import tempfile
from pathlib import Path

from trn.core.home import Home

MAX_NAME_BYTES = 255


def find_folder_fault(path: Path, home: Home) -> str:
    """Why log files could not be written below it; empty: they could. Blocks."""
    return _find_fault(path, home, is_folder=True)


def find_file_fault(path: Path, home: Home) -> str:
    """Why lines could not be appended to it; empty: they could. Blocks."""
    return _find_fault(path, home, is_folder=False)


def _find_fault(path: Path, home: Home, *, is_folder: bool) -> str:
    if path.is_relative_to(home.root) and not (is_folder and path == home.logs.root):
        return "it is in the daemon's own folder: choose another place"
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
        return f"a name in it is longer than {MAX_NAME_BYTES} bytes: choose another place"
    try:
        if not path.exists():
            return _find_fault_of_making(path)
        if is_folder and not path.is_dir():
            return "it is not a folder: choose another one"
        if not is_folder and not path.is_file():
            return "it is not a regular file: choose another one"
        if is_folder:
            _write_in(path)
        else:
            path.open("ab").close()
    except OSError as fault:
        return f"it cannot be written: {fault.strerror}: choose another place, or change its mode"
    return ""


def _find_fault_of_making(path: Path) -> str:
    nearest = next(parent for parent in path.parents if os.path.lexists(parent))
    if not nearest.is_dir():
        return f"{nearest} is not a folder: choose another place"
    try:
        _write_in(nearest)
    except OSError as fault:
        return f"it cannot be made in {nearest}: {fault.strerror}: choose another place"
    return ""


def _write_in(folder: Path) -> None:
    """OSError where no file can be made there."""
    tempfile.TemporaryFile(dir=folder).close()
