"""Expands the paths of a job to parquet files, in reading order. Needs no pyarrow."""

import difflib
import fnmatch
import glob
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

PART_SUFFIX = f"-00000-{'0' * 16}.parquet"  # of the name that a part of a prediction has


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


def reads_output(text: str, out: str) -> bool:
    """Whether this absolute path names also what a prediction of its files would write into the folder `out`."""
    folder = PurePath(os.path.realpath(out))
    if Path(text).is_dir():
        root = PurePath(os.path.realpath(text))
        is_below = folder.is_relative_to(root)
        return is_below and not any(part.startswith((".", "_")) for part in folder.relative_to(root).parts)
    if not glob.has_magic(text) or Path(text).is_file():
        return False
    written = (folder / f"{Path(file).stem}{PART_SUFFIX}" for file in expand_parquet_paths([text], []))
    pattern = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))  # noqa: PTH118, PTH119, PTH120
    if "**" in text:
        return any(fnmatch.fnmatchcase(str(path), pattern) for path in written)
    return any(path.match(pattern) for path in written)


def say_output_is_read(text: str, out: str) -> str:
    return f"{out} is a part of the data ({text}): predictions would be read as rows. Choose another folder"


def _is_file(path: Path, faults: list[str]) -> bool:
    """A folder is none. Anything else is a fault: rows that somebody meant would be missing without a word."""
    if path.is_file():
        return True
    if not path.is_dir() and os.path.lexists(path):
        what = "a link whose target is gone" if path.is_symlink() and not path.exists() else "no regular file"
        faults.append(f"{path}: it is {what}, expected a parquet file")
    return False
