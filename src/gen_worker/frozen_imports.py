"""Imports a run's own modules from its frozen copy, also where an editable install points to the original folder.

Without this, a retry would train code that was edited since. The folders of the copy come first on the import path, and a
finder before all others maps what they find to the copy. Modules that the copy does not have are imported from their
place; `author.code_identity` reports them.

Two environment variables name the original folder and the copy, for every process that a worker starts.
"""

import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

ORIGINAL = "GEN_WORKER_FROZEN_FROM"
COPY = "GEN_WORKER_FROZEN_CODE"

OURS = frozenset({"gen_worker", "trn"})  # never the author's
_MAIN = frozenset({"__main__", "__mp_main__"})
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages(?:[/\\]|\Z)")
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120


class FrozenCode(NamedTuple):
    """A folder and its frozen copy, as absolute paths. The real ones have links resolved."""

    original: str
    copy: str
    real_original: str
    real_copy: str

    def to_copy(self, path: str) -> str | None:
        """The path in the copy; None where `path` is not below the original folder."""
        if self.to_original(path) is not None:  # the copy may be below the original folder
            return None
        return _moved(path, (self.original, self.real_original), self.copy)

    def to_original(self, path: str) -> str | None:
        """The path in the original folder; None where `path` is not below the copy."""
        return _moved(path, (self.copy, self.real_copy), self.original)


def frozen_variables(original: str, copy: str) -> dict[str, str]:
    """The environment variables for a process and its children."""
    return {ORIGINAL: original, COPY: copy} if original and copy else {}


def read_frozen_code(environ: Mapping[str, str] = os.environ) -> FrozenCode | None:
    """None in a process that has no frozen code."""
    original, copy = environ.get(ORIGINAL), environ.get(COPY)
    if not original or not copy:
        return None
    return _frozen_code(original, copy)


@cache
def _frozen_code(original: str, copy: str) -> FrozenCode:
    return FrozenCode(original, copy, os.path.realpath(original), os.path.realpath(copy))


def import_frozen_code(environ: MutableMapping[str, str] = os.environ) -> FrozenCode | None:
    """Call it before any import of the author's code: from then on the copy is imported. Safe to repeat."""
    code = read_frozen_code(environ)
    if code is None:
        return None
    sys.path[:] = _with_copies(sys.path, code)
    given = environ.get("PYTHONPATH")
    if given:
        environ["PYTHONPATH"] = os.pathsep.join(_with_copies(given.split(os.pathsep), code))
    if not any(isinstance(finder, _FrozenFinder) for finder in sys.meta_path):
        _forget_originals(code)
        sys.meta_path.insert(0, _FrozenFinder(code))
    return code


def name_originals(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text, with the original file beside each frozen one, also in tracebacks."""
    code = read_frozen_code(environ)
    if code is None or code.copy not in text:
        return text

    def replace(found: re.Match[str]) -> str:
        path, rest = (found["quoted"], found["rest"]) if found["quoted"] else (found["bare"], found["line"])
        mark = '"' if found["quoted"] else ""
        head = "File " if mark else ""
        original = f"{code.original}{path[len(code.copy) :]}"
        return f"{head}{mark}{original}{mark}{rest or ''} (frozen copy: {path})"

    return _places_in(code.copy).sub(replace, text)


@cache
def _places_in(copy: str) -> re.Pattern[str]:
    place = rf"{re.escape(copy)}/"
    return re.compile(
        rf'File "(?P<quoted>{place}[^"\n]+)"(?P<rest>, line \d+(?:, in [^\n]+)?)'
        rf"|(?<!frozen copy: )(?P<bare>{place}[^\s:\"'()]+)(?P<line>(?::\d+)?)"
    )


def find_left_out(name: str) -> str | None:
    """The original file of a module that is not in the copy, if there is one."""
    code = read_frozen_code()
    if code is None:
        return None
    place = name.replace(".", os.sep)
    for path in (f"{place}.py", os.path.join(place, "__init__.py")):  # noqa: PTH118
        original = os.path.join(code.original, path)  # noqa: PTH118
        if os.path.isfile(original) and not os.path.exists(os.path.join(code.copy, path)):  # noqa: PTH110, PTH113, PTH118
            return original
    return None


def file_of(module: object) -> str | None:
    """`__file__` of a module, without loading anything."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def outside_imports() -> dict[str, str]:
    """Imported modules that are neither installed nor in the frozen code, with their files."""
    for finder in sys.meta_path:
        if isinstance(finder, _FrozenFinder):
            return finder.outside.copy()
    return {}


def note_warm_modules() -> None:
    """Before a fork: check all modules once. In a fork each check would copy a memory page."""
    _warm.num_modules = len(sys.modules)
    _warm.strangers = [
        name
        for name, module in sys.modules.items()
        if (file := file_of(module)) is not None and not _is_ours(name) and not is_installed(file)
    ]


def is_installed(path: str) -> bool:
    """Whether it belongs to Python or to a regularly installed package."""
    if _INSTALLED.search(path):
        return True
    return path.startswith(f"{_STDLIB}{os.sep}")


class _FrozenFinder:
    """Asks all other finders, and maps what they find to the copy."""

    def __init__(self, code: FrozenCode) -> None:
        self._code = code
        self.outside: dict[str, str] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in OURS or (path is not None and all(map(is_installed, path))):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return self._frozen(spec)
        return None if path is None else self._find_left_out(name, path)

    def _frozen(self, spec: ModuleSpec) -> ModuleSpec:
        """The spec in the copy; unchanged for installed modules and what the copy does not have."""
        locations = spec.submodule_search_locations
        if spec.origin is None or not spec.has_location:
            if spec.loader is None and locations is not None:  # a package without a file: only folders
                spec.submodule_search_locations = self._frozen_folders(locations)
            return spec
        if is_installed(spec.origin):
            return spec
        copy = self._code.to_copy(spec.origin)
        if copy is None or not os.path.isfile(copy):  # noqa: PTH113
            if self._code.to_original(spec.origin) is None:
                self.outside[spec.name] = spec.origin
            return spec
        folders = None if locations is None else self._frozen_folders(locations)
        return (
            importlib.util.spec_from_file_location(spec.name, copy, submodule_search_locations=folders)
            or spec
        )

    def _frozen_folders(self, folders: Iterable[str]) -> list[str]:
        copies = ((folder, self._code.to_copy(folder)) for folder in folders)
        return list(
            dict.fromkeys(copy if copy and os.path.isdir(copy) else folder for folder, copy in copies)  # noqa: PTH112
        )

    def _find_left_out(self, name: str, path: Sequence[str]) -> ModuleSpec | None:
        """A module of a frozen package that the copy does not have: ignored by git, or built in place."""
        originals = [original for folder in path if (original := self._code.to_original(folder)) is not None]
        spec = importlib.machinery.PathFinder.find_spec(name, originals) if originals else None
        if spec is None or spec.loader is None:
            return None
        self.outside[name] = spec.origin or ""
        return spec


def _with_copies(folders: Iterable[str], code: FrozenCode) -> list[str]:
    """Each copy before its original folder, which stays for what the copy does not have."""
    found: dict[str, None] = {}
    for folder in folders:
        copy = code.to_copy(folder) if folder else None
        is_ours = copy is not None and os.path.realpath(folder) == _OUR_FOLDER
        if copy is not None and not is_ours and os.path.isdir(copy):  # noqa: PTH112
            found[copy] = None
        found[folder] = None
    return list(found)


class _WarmModules:
    """What the launcher had imported before the fork."""

    def __init__(self) -> None:
        self.num_modules = 0
        self.strangers: list[str] = []  # of these, neither ours nor installed


_warm = _WarmModules()


def _forget_originals(code: FrozenCode) -> None:
    num_new = max(len(sys.modules) - _warm.num_modules, 0)
    for name in (*_warm.strangers, *itertools.islice(reversed(sys.modules), num_new)):
        file = file_of(sys.modules.get(name))
        if file is None or _is_ours(name) or is_installed(file):
            continue
        copy = code.to_copy(file)
        if copy is not None and os.path.isfile(copy):  # noqa: PTH113
            del sys.modules[name]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in OURS or name in _MAIN


def _moved(path: str, roots: Iterable[str], target: str) -> str | None:
    for place in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):  # noqa: PTH100
        for root in roots:
            if place == root:
                return target
            if place.startswith(f"{root}{os.sep}"):
                return target + place[len(root) :]
    return None
