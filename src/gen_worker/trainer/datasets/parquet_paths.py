"""The parquet files that a job's paths stand for, in the order in which they are read. Needs no pyarrow."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path


def expand_parquet_paths(paths: Sequence[str], faults: list[str]) -> list[str]:
    """Files as they are, of a folder all `*.parquet` below it, of a pattern all files that match; both sorted.

    What stands for no file is added to `faults`, with the nearest name that there is.
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
                faults.append(f"{text}: the folder holds no *.parquet file")
            files.extend(str(path / name) for name in found)
        elif glob.has_magic(text):
            found = sorted(match for match in glob.glob(text, recursive=True) if Path(match).is_file())  # noqa: PTH207  (absolute patterns)
            if not found:
                faults.append(f"{text}: the pattern matches no file")
            files.extend(found)
        else:
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, siblings, n=1)
            hint = f"; did you mean {path.parent / close[0]}?" if close else ""
            faults.append(f"{text}: no such file or folder{hint}")
    return files
