"""The code of a run that has no snapshot: the modules of its folder that it imports, as one digest.

Found by reading, not by importing: the module of each `module:symbol`, and whatever modules of the same folder these
name in an import, and so on. Installed packages are not part of it.
"""

import ast
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 2000
MAX_KNOWN = 20_000
MAX_FOUND = 200
SETTLE_NS = 2_000_000_000  # a file that changed later than this ago may change again within one clock tick

Mark = tuple[int, int, int, int]  # inode, size, modification and change time


class _Source(NamedTuple):
    """One file as it was read."""

    mark: Mark
    hash: str
    imports: tuple[str, ...]  # modules, as absolute names


class _Found(NamedTuple):
    """A digest, and what must not have changed for it to hold: its files, and the folders in which one could appear."""

    watched: dict[str, Mark]
    digest: str


class UnfrozenCode:
    """Remembers files that have not changed. Any thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Source] = {}
        self._found: dict[tuple[str, ...], _Found] = {}

    def known(self, folder: str, refs: Sequence[str]) -> str | None:
        """The digest, where it is remembered and still holds: a few looks at file times. None: `read` it."""
        found = self._found.get((folder, *refs))
        if found is None or any(_mark(path) != mark for path, mark in found.watched.items()):
            return None
        return found.digest

    def read(self, folder: str, refs: Sequence[str]) -> str:
        """The digest; empty where no module of `refs` lies in that folder. Blocks."""
        began_ns = time.time_ns()
        todo = [ref.partition(":")[0] for ref in refs]
        seen = set(todo)
        files: dict[str, str] = {}
        watched: dict[str, Mark | None] = {}
        while todo and len(files) < MAX_FILES:
            for name, package in _places(todo.pop()):
                path = f"{folder}/{name}"
                if name in files:
                    continue
                mark = _mark(path)
                if mark is None:
                    place = _nearest(path)
                    watched[place] = _mark(place)
                    continue
                source = self._known.get(path)
                if source is None or source.mark != mark:
                    source = self._read(path, mark, package)
                watched[path] = mark
                files[name] = source.hash
                fresh = [module for module in source.imports if module not in seen]
                seen.update(fresh)
                todo += fresh
        lines = "".join(f"{name} {content}\n" for name, content in sorted(files.items()))
        digest = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
        found = f"unfrozen:{digest}" if files else ""
        self._remember((folder, *refs), watched, found, began_ns)
        return found

    def _remember(
        self, key: tuple[str, ...], watched: dict[str, Mark | None], digest: str, began_ns: int
    ) -> None:
        settled = {
            path: mark for path, mark in watched.items() if mark and began_ns - max(mark[2:]) > SETTLE_NS
        }
        if len(settled) == len(watched):
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            self._found[key] = _Found(settled, digest)

    def _read(self, path: str, mark: Mark, package: str) -> _Source:
        try:
            text = Path(path).read_bytes()
        except OSError as fault:
            return _Source(mark, f"unreadable:{fault.errno}", ())
        source = _Source(
            mark, hashlib.sha256(text).hexdigest(), tuple(dict.fromkeys(_imports(text, package)))
        )
        if time.time_ns() - max(mark[2:]) > SETTLE_NS and _mark(path) == mark:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[path] = source
        return source


def _nearest(path: str) -> str:
    """What is there of the way to a file that is not: it changes when the file, or a folder on the way, is made."""
    while path and not os.path.lexists(path):
        path = path.rpartition("/")[0]
    return path or "/"


def _places(module: str) -> Iterator[tuple[str, str]]:
    """(the file, the package that its relative imports start from): of the module and of the packages above it."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = "/".join(parts[:depth])
        yield f"{path}/__init__.py", ".".join(parts[:depth])
    yield f"{'/'.join(parts)}.py", ".".join(parts[:-1])


def _imports(text: bytes, package: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            above = parts[: len(parts) - (node.level - 1)] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            prefix = f"{base}." if base else ""
            yield from (f"{prefix}{alias.name}" for alias in node.names if alias.name != "*")


def _mark(path: str) -> Mark | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (hot)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
