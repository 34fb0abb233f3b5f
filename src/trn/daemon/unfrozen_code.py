"""The code of a run that has no snapshot: the modules of its folder that it imports, as one digest.

Found by reading, not by importing: the module of each `module:symbol`, and whatever modules of the same folder these
name in an import, and so on. Installed packages are not part of it.
"""

import ast
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 2000
MAX_KNOWN = 20_000
SETTLE_NS = 2_000_000_000  # a file that changed later than this ago may change again within one clock tick

Mark = tuple[int, int, int, int]  # inode, size, modification and change time


class _Source(NamedTuple):
    """One file as it was read."""

    mark: Mark
    hash: str
    imports: tuple[str, ...]  # modules, as absolute names


class UnfrozenCode:
    """Remembers files that have not changed. Any thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Source] = {}

    def known(self, folder: str, refs: Iterable[str]) -> str | None:
        """The digest, where every file of it is remembered and unchanged: a few looks at file times. None: `read` it."""
        return self._digest(folder, refs, is_read=False)

    def read(self, folder: str, refs: Iterable[str]) -> str:
        """The digest; empty where no module of `refs` lies in that folder. Blocks."""
        found = self._digest(folder, refs, is_read=True)
        assert found is not None
        return found

    def _digest(self, folder: str, refs: Iterable[str], *, is_read: bool) -> str | None:
        todo = [ref.partition(":")[0] for ref in refs]
        seen = set(todo)
        files: dict[str, str] = {}
        while todo and len(files) < MAX_FILES:
            for name, package in _places(todo.pop()):
                path = f"{folder}/{name}"
                if name in files or (mark := _mark(path)) is None:
                    continue
                source = self._known.get(path)
                if source is None or source.mark != mark:
                    if not is_read:
                        return None
                    source = self._read(path, mark, package)
                files[name] = source.hash
                fresh = [module for module in source.imports if module not in seen]
                seen.update(fresh)
                todo += fresh
        if not files:
            return ""
        lines = "".join(f"{name} {content}\n" for name, content in sorted(files.items()))
        return f"unfrozen:{hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()}"

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
