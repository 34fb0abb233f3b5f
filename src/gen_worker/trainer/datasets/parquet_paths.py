"""Expands the paths of a job to parquet files, in reading order. Needs no pyarrow."""

import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path


def expand_parquet_paths(paths: Sequence[str], faults: list[str]) -> list[str]:
    """Files, all `*.parquet` below a folder, and all matches of a glob, sorted.

    A path without files is added to `faults`, with the nearest existing name; so is what has the name of a file and is none.
    """
    files: list[str] = []
    for text in paths:
        path = Path(text)
        if path.is_file():
            files.append(text)
        elif path.is_dir():
            found = sorted(
                file.relative_to(path).as_posix()
                for file in path.rglob("*.parquet")
                if not any(p.startswith((".", "_")) for p in file.relative_to(path).parts)
                and _is_file(file, faults)
            )
            if not found:
                faults.append(f"{text}: the folder has no *.parquet file")
            files.extend(str(path / name) for name in found)
        elif glob.has_magic(text):
            matches = glob.glob(text, recursive=True)  # noqa: PTH207  (absolute patterns)
            found = sorted(match for match in matches if _is_file(Path(match), faults))
            if not found:
                faults.append(f"{text}: the pattern matches no file")
            files.extend(found)
        elif os.path.lexists(path):
            _is_file(path, faults)
        else:
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, siblings, n=1)
            hint = f": did you mean {path.parent / close[0]}?" if close else ""
            faults.append(f"{text}: no such file or folder{hint}")
    return files


def _is_file(path: Path, faults: list[str]) -> bool:
    """A folder is none. Anything else is a fault: rows that somebody meant would be missing without a word."""
    if path.is_file():
        return True
    if not path.is_dir() and os.path.lexists(path):
        what = "a link whose target is gone" if path.is_symlink() and not path.exists() else "no regular file"
        faults.append(f"{path}: it is {what}, expected a parquet file")
    return False
