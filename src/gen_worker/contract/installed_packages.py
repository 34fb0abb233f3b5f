"""Short stamps of the packages of an interpreter and of source folders: equal while nothing changes.

Reads only names and times in the site folders. As a program it answers for another interpreter, so it needs only the
standard library.
"""

import json
import os
import site
import sys
import time
from pathlib import Path
from typing import NamedTuple

ASK_PATIENCE_S = 60.0
SETTLED_NS = (
    2_000_000_000  # a folder that changed later than this ago may change once more within one clock tick
)
DIST_SUFFIXES = (".dist-info", ".egg-info")
LINK_SUFFIXES = (".pth", ".egg-link")
EDITABLE_PREFIX = "__editable__"  # setuptools: the finder of an editable install

Mark = tuple[str, int, int]  # path, modification time, size; -1 where there is nothing


class _Interpreter(NamedTuple):
    real_path: str
    version: str
    folders: tuple[str, ...]


class _Scan(NamedTuple):
    """A digest, and the marks that show whether it is still valid."""

    marks: tuple[Mark, ...]
    digest: str


_asked: dict[str, tuple[tuple[Mark, ...], _Interpreter]] = {}
_scanned: dict[_Interpreter, _Scan] = {}
_real_paths: dict[str, tuple[tuple[int, int], str]] = {}  # (device, inode), the path without links


def packages_stamp(interpreter: str | Path = "") -> str:
    """A digest of an interpreter (default: this one) and of all that is installed for it.

    It changes with every install, upgrade and removal, also of editable installs; PYTHONPATH is not part of it.
    OSError where another interpreter does not answer. Blocks: the first call lists the site folders and may start the
    other interpreter.
    """
    path = str(interpreter)
    place = _this() if not path or is_same_python(path, sys.executable) else _ask(path)
    known = _scanned.get(place)
    if known is not None and all(_mark(mark[0]) == mark for mark in known.marks):
        return known.digest
    return _scan(place)


def source_stamp(*folders: Path) -> str:
    """Changes with the number, sizes and times of the Python files below these folders. Blocks briefly."""
    num_files = size_bytes = times_ns = 0
    todo = [str(folder) for folder in folders]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    found = entry.stat()
                    num_files += 1
                    size_bytes += found.st_size
                    times_ns += found.st_mtime_ns
                elif entry.name != "__pycache__" and entry.is_dir():
                    todo.append(entry.path)
    return f"{num_files}-{size_bytes}-{times_ns}"


def is_same_python(one: str, other: str) -> bool:
    """Whether both are one interpreter of one environment, like `python` and `python3` in a folder."""
    if one == other:
        return True
    is_beside = os.path.dirname(one) == os.path.dirname(other)  # noqa: PTH120
    return is_beside and real_python(one) == real_python(other)


def real_python(python: str) -> str:
    """Its path without links; cached while it is the same file."""
    try:
        found = os.stat(python)  # noqa: PTH116  (hot)
    except OSError:
        return os.path.realpath(python)
    file = found.st_dev, found.st_ino
    known = _real_paths.get(python)
    if known is None or known[0] != file:
        known = _real_paths[python] = file, os.path.realpath(python)
    return known[1]


def _this() -> _Interpreter:
    return _Interpreter(real_python(sys.executable), sys.version, tuple(site_folders()))


def site_folders() -> list[str]:
    """The package folders of this interpreter, whatever its flags; with those of system and user if it includes them."""
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix or sys.base_prefix in site.PREFIXES:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys(folders))


def _ask(python: str) -> _Interpreter:
    """Once for each state of its file and of its environment's settings."""
    import subprocess

    settings = Path(python).parent.parent / "pyvenv.cfg"
    marks = (_mark(python), _mark(str(settings)))
    known = _asked.get(python)
    if known is not None and known[0] == marks:
        return known[1]
    try:
        done = subprocess.run(
            [python, "-I", __file__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_PATIENCE_S,
            check=True,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        place = _Interpreter(str(answer[0]), str(answer[1]), tuple(map(str, answer[2])))
    except (subprocess.SubprocessError, ValueError, IndexError) as fault:
        raise OSError(f"{python} cannot be asked which packages it has: {fault}") from fault
    _asked[python] = (marks, place)
    return place


def _scan(place: _Interpreter) -> str:
    import hashlib

    began_ns = time.time_ns()
    marks = [_mark(folder) for folder in place.folders]
    digest = hashlib.sha256(f"{place.real_path}\n{place.version}\n".encode())
    for folder in place.folders:
        digest.update(f"{folder}\n".encode(errors="surrogateescape"))
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # missing or unreadable: as if empty
            continue
        for entry in entries:
            name = entry.name
            if name.endswith(DIST_SUFFIXES):
                mark = _mark(entry.path)
                digest.update(f"{name} {mark[1]}\n".encode(errors="surrogateescape"))
            elif name.endswith(LINK_SUFFIXES) or (name.startswith(EDITABLE_PREFIX) and name.endswith(".py")):
                marks.append(_mark(entry.path))
                digest.update(f"{name}\n".encode(errors="surrogateescape") + _content(entry.path) + b"\n")
    text = digest.hexdigest()[:32]
    if all(began_ns - mark[1] > SETTLED_NS for mark in marks):
        _scanned[place] = _Scan(tuple(marks), text)
    return text


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # missing or unreadable
        return b""


def _mark(path: str) -> Mark:
    try:
        found = os.stat(path)  # noqa: PTH116  (hot)
    except OSError:
        return path, -1, -1
    return path, found.st_mtime_ns, found.st_size


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_this()) + "\n")
