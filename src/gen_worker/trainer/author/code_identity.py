"""The identity of a run's code: the file of its trainer class, and the author's modules outside the snapshot.

Frozen code cannot change between attempts. A module elsewhere (another editable install, a PYTHONPATH folder, a file that
git ignores) can: a warning names it, its digest is saved with the run and in checkpoints, and a change is reported.
"""

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.screen_repr import name_some
from gen_worker.frozen_imports import (
    OURS,
    file_of,
    is_installed,
    outside_imports,
    read_frozen_code,
)

OUTSIDE_NAME = "code_outside.json"
_BOM = b"\xef\xbb\xbf"


class OutsideModule(msgspec.Struct, frozen=True, kw_only=True):
    """A module of the author's that is not in the frozen code."""

    file: str
    digest: str


class OutsideCode(msgspec.Struct, frozen=True, kw_only=True):
    """`code_outside.json` in the run's folder, by module name."""

    schema_version: str = "code_outside.v1"
    modules: dict[str, OutsideModule] = {}

    @property
    def digests(self) -> dict[str, str]:
        return {name: module.digest for name, module in self.modules.items()}


def describe_code(trainer_class: type) -> dict[str, Any]:
    """Name and file of the trainer class, with digests of the file's bytes and of its source."""
    identity: dict[str, Any] = {"trainer": f"{trainer_class.__module__}:{trainer_class.__qualname__}"}
    try:
        path = Path(inspect.getfile(trainer_class))
        data = path.read_bytes()
    except (OSError, TypeError):
        identity["file"] = None  # made in memory: a notebook, a test
    else:
        identity |= {"file": path.name, "digest": _digest(data), "source_digest": _source_digest(data)}
    return identity


def code_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between the `describe_code` of two identities, as text. Module path and folder do not count."""
    was, is_ = saved.get("code") or {}, now["code"]
    changes = []
    if was and _class_name(was) != _class_name(is_):
        changes.append(f"the trainer class was {was.get('trainer')}, is now {is_['trainer']}")
    elif _is_other_source(was, is_):
        changes.append(f"the code of {is_['trainer']} changed")
    return changes


def find_outside_code(imports: Mapping[str, str]) -> dict[str, OutsideModule]:
    """The author's modules among `imports` (name -> file) that this process has imported."""
    found = {}
    for name in sorted(name for name in imports if name in sys.modules):
        if _is_authors(name, imports[name]):
            try:
                data = Path(imports[name]).read_bytes()
            except OSError:  # gone since, or in an archive
                continue
            found[name] = OutsideModule(file=imports[name], digest=_source_digest(data))
    return found


def hash_author_files() -> dict[str, str]:
    """SHA-256 of the bytes of each file of the author's that this process has imported, in hexadecimal. Blocks."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = file_of(module)
        if file is not None and _is_authors(name, file):
            with contextlib.suppress(OSError):  # gone since, or in an archive
                found[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def find_changed_modules(folder: Path) -> list[str]:
    """Modules outside the frozen code of a run whose source has changed or is missing. Blocks."""
    changed = []
    for name, module in _read_kept(folder / OUTSIDE_NAME).modules.items():
        try:
            data = Path(module.file).read_bytes()
        except OSError:
            changed.append(f"{name} ({module.file})")
        else:
            if _source_digest(data) != module.digest:
                changed.append(f"{name} ({module.file})")
    return changed


class OutsideCodeWatch:
    """Records the author's modules outside the snapshot in the run's folder and identity. One thread at a time.

    They are compared with `saved`, the identity of the resumed checkpoint, or with what an earlier attempt recorded.
    """

    def __init__(
        self, identity: dict[str, Any], folder: Path, *, saved: Mapping[str, Any] | None = None
    ) -> None:
        self._identity = identity
        self._path = folder / OUTSIDE_NAME
        self._kept = _read_kept(self._path)
        self._since = "the last attempt" if saved is None else "the checkpoint"
        self._known = self._kept.digests if saved is None else saved.get("outside_code") or {}
        self._found: dict[str, OutsideModule] = {}
        if read_frozen_code() is not None:
            identity["outside_code"] = {}

    def look(self) -> list[str]:
        """Warnings about modules that were imported since the last call. Cheap where there are none."""
        imports = {name: file for name, file in outside_imports().items() if name not in self._found}
        new = find_outside_code(imports)
        if not new:
            return []
        named = {name.partition(".")[0] for name in self._found}
        self._found |= new
        self._identity["outside_code"] = {name: module.digest for name, module in self._found.items()}
        unnamed = {name: module for name, module in new.items() if name.partition(".")[0] not in named}
        warnings = [_warning(unnamed)] if unnamed else []
        changed = sorted(name for name in new if self._known.get(name, new[name].digest) != new[name].digest)
        if changed:
            warnings.append(f"code outside the snapshot changed since {self._since}: {name_some(changed)}")
        return warnings + self._keep()

    def _keep(self) -> list[str]:
        outside = OutsideCode(modules={**self._kept.modules, **self._found})
        if outside == self._kept:
            return []
        try:
            replace_file(
                self._path,
                msgspec.json.format(msgspec.json.encode(outside), indent=2) + b"\n",
                sync="file",
                mode=0o600,
            )
        except OSError as fault:
            return [f"{self._path} cannot be written: {fault.strerror}"]
        self._kept = outside
        return []


def _read_kept(path: Path) -> OutsideCode:
    try:
        return msgspec.json.decode(path.read_bytes(), type=OutsideCode)
    except (OSError, msgspec.MsgspecError):  # not written, or cut by a power failure
        return OutsideCode()


def _warning(modules: Mapping[str, OutsideModule]) -> str:
    tops: dict[str, str] = {}
    for name, module in modules.items():
        tops.setdefault(name.partition(".")[0], module.file)
    named = name_some([f"{name} ({file})" for name, file in tops.items()])
    return (
        f"imported from outside the frozen code: {named}. A retry or resume imports its version of that time."
        f" {OUTSIDE_NAME} has the digests. To freeze such code, put it into the folder of the job or of --code"
    )


def _class_name(identity: Mapping[str, Any]) -> str:
    """Without its module, which depends on how the file is imported."""
    return str(identity.get("trainer")).rpartition(":")[2]


def _is_other_source(was: Mapping[str, Any], is_: Mapping[str, Any]) -> bool:
    if was.get("digest") is None or is_.get("digest") is None or was["digest"] == is_["digest"]:
        return False
    return was.get("source_digest") is None or bool(was["source_digest"] != is_["source_digest"])


def _is_authors(name: str, file: str) -> bool:
    """Judged by its top-level package: modules that an installed package makes elsewhere are not the author's."""
    top = name.partition(".")[0]
    if top in OURS or top in ("__main__", "__mp_main__"):
        return False
    top_file = file_of(sys.modules.get(top))
    return not any(_is_regular_install(place) for place in (file, top_file) if place is not None)


def _is_regular_install(file: str) -> bool:
    if is_installed(file):
        return True
    return any(file.startswith(f"{folder}{os.sep}") and _is_target(folder) for folder in sys.path if folder)


@cache
def _is_target(folder: str) -> bool:
    """A folder of `pip install --target`: it has `.dist-info` records."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return hash_bytes(data)


def _source_digest(data: bytes) -> str:
    """Independent of line ends and byte order mark."""
    return _digest(data.removeprefix(_BOM).replace(b"\r\n", b"\n"))
