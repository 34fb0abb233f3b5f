"""Expands the paths of a job to parquet files, in reading order. Needs no pyarrow."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path


def expand_parquet_paths(paths: Sequence[str], faults: list[str]) -> list[str]:
    """Files, all `*.parquet` below a folder, and all matches of a glob, sorted.

    A path without files is added to `faults`, with the nearest existing name.
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
                if file.is_file() and not any(p.startswith((".", "_")) for p in file.relative_to(path).parts)
            )
            if not found:
                faults.append(f"{text}: the folder has no *.parquet file")
            files.extend(str(path / name) for name in found)
        elif glob.has_magic(text):
            found = sorted(match for match in glob.glob(text, recursive=True) if Path(match).is_file())  # noqa: PTH207  (absolute patterns)
            if not found:
                faults.append(f"{text}: the pattern matches no file")
            files.extend(found)
        else:
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, siblings, n=1)
            hint = f": did you mean {path.parent / close[0]}?" if close else ""
            faults.append(f"{text}: no such file or folder{hint}")
    return files
