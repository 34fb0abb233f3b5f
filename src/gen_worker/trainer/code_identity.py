"""Which code a run trains: the file of its trainer class, and the author's modules that no snapshot holds.

Frozen code cannot change between attempts. A module that lies elsewhere (another editable install, a folder of
PYTHONPATH, a file that git ignores) can: it is named in a warning, its digest is kept with the run and in every
checkpoint, and an attempt that finds another digest says so.
"""

import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from gen_worker.frozen_imports import OURS, FrozenCode, is_installed, read_frozen_code
from gen_worker.launcher_protocol import write_atomically

OUTSIDE_NAME = "code_outside.json"
MAX_TOLD = 5
_BOM = b"\xef\xbb\xbf"


class OutsideModule(msgspec.Struct, frozen=True, kw_only=True):
    """A module of the author's that was imported from outside the frozen code."""

    file: str
    digest: str


class OutsideCode(msgspec.Struct, frozen=True, kw_only=True):
    """`code_outside.json` in the run's folder, by the names of the modules."""

    schema_version: str = "code_outside.v1"
    modules: dict[str, OutsideModule] = {}

    @property
    def digests(self) -> dict[str, str]:
        return {name: module.digest for name, module in self.modules.items()}


def describe_code(trainer_class: type) -> dict[str, Any]:
    """Of the trainer class: its name, its file's name, and the digests of the file's bytes and of its source."""
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
    """What differs between two identities of a run, of `describe_code` and of the code outside its snapshot, in words.

    The same class of the same source is the same, by whichever module path it was imported and wherever it lay.
    """
    was, is_ = saved.get("code") or {}, now["code"]
    changes = []
    if was and _class_name(was) != _class_name(is_):
        changes.append(f"the trainer class was {was.get('trainer')}, is now {is_['trainer']}")
    elif _is_other_source(was, is_):
        changes.append(f"the code of {is_['trainer']} changed")
    return changes + outside_changes(saved.get("outside_code") or {}, now.get("outside_code") or {})


def outside_changes(was: Mapping[str, str], is_: Mapping[str, str]) -> list[str]:
    """Of two sets of digests by module: what is in both and differs."""
    names = sorted(name for name in was.keys() & is_.keys() if was[name] != is_[name])
    return [f"code outside its snapshot changed: {_listed(names)}"] if names else []


def find_outside_code(
    code: FrozenCode | None = None, modules: Mapping[str, ModuleType] | None = None
) -> OutsideCode:
    """The author's modules that this process imported from outside its frozen code; none where nothing is frozen."""
    code = read_frozen_code() if code is None else code
    if code is None:
        return OutsideCode()
    modules = dict(sys.modules) if modules is None else modules
    found = {}
    for name in sorted(modules):
        file = getattr(modules[name], "__file__", None)
        if not isinstance(file, str) or not _is_authors(name, file, modules):
            continue
        if code.to_original(file) is None:
            try:
                found[name] = OutsideModule(file=file, digest=_source_digest(Path(file).read_bytes()))
            except OSError:  # gone since, or in an archive
                continue
    return OutsideCode(modules=found)


def note_outside_code(identity: dict[str, Any], folder: Path, *, is_fresh: bool) -> list[str]:
    """Keep what `find_outside_code` finds in the run's folder and its identity; what there is to say of it.

    An attempt that resumes has its checkpoint to compare with; a fresh one has what an earlier attempt kept.
    """
    outside = find_outside_code()
    warnings = []
    if outside.modules:
        identity["outside_code"] = outside.digests
        warnings.append(_warning(outside))
    path = folder / OUTSIDE_NAME
    kept = _read_kept(path)
    if is_fresh:
        changes = outside_changes(kept.digests, outside.digests)
        warnings += [f"since the last attempt {change}" for change in changes]
    if outside != kept:
        try:
            write_atomically(path, msgspec.json.format(msgspec.json.encode(outside), indent=2) + b"\n")
        except OSError as fault:
            warnings.append(f"{path} cannot be written: {fault.strerror}")
    return warnings


def _read_kept(path: Path) -> OutsideCode:
    try:
        return msgspec.json.decode(path.read_bytes(), type=OutsideCode)
    except (OSError, msgspec.MsgspecError):  # none was written, or half of it before a power cut
        return OutsideCode()


def _warning(outside: OutsideCode) -> str:
    tops: dict[str, str] = {}
    for name, module in outside.modules.items():
        tops.setdefault(name.partition(".")[0], module.file)
    named = _listed([f"{name} ({file})" for name, file in tops.items()])
    return (
        f"imported from outside the frozen code: {named}. A retry or resume imports what is there then."
        f" {OUTSIDE_NAME} keeps the digests. To freeze such code, put it into the folder of the job or of --code"
    )


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
    return ", ".join(names[:MAX_TOLD]) + more


def _class_name(identity: Mapping[str, Any]) -> str:
    """Without its module: a script is `__main__`, and a file may be imported as a part of its package or alone."""
    return str(identity.get("trainer")).rpartition(":")[2]


def _is_other_source(was: Mapping[str, Any], is_: Mapping[str, Any]) -> bool:
    if was.get("digest") is None or is_.get("digest") is None or was["digest"] == is_["digest"]:
        return False
    return was.get("source_digest") is None or bool(was["source_digest"] != is_["source_digest"])


def _is_authors(name: str, file: str, modules: Mapping[str, ModuleType]) -> bool:
    """Judged by the top of its package: what an installed one makes or loads elsewhere is not the author's."""
    top = name.partition(".")[0]
    if top in OURS or top in ("__main__", "__mp_main__"):
        return False
    top_file = getattr(modules.get(top), "__file__", None)
    return not any(_is_regular_install(place) for place in (file, top_file) if isinstance(place, str))


def _is_regular_install(file: str) -> bool:
    if is_installed(file):
        return True
    return any(file.startswith(f"{folder}{os.sep}") and _is_target(folder) for folder in sys.path if folder)


@cache
def _is_target(folder: str) -> bool:
    """A folder that `pip install --target` filled: it holds the records of what is installed."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _source_digest(data: bytes) -> str:
    """The same for the same source, whatever the editor or git made of its line ends."""
    return _digest(data.removeprefix(_BOM).replace(b"\r\n", b"\n"))
