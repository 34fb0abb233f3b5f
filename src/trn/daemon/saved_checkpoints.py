"""The checkpoints of a run, as far as it takes to choose one: which there are, and which are as they were saved."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trn.core.errors import InvalidRequestError

META_SUFFIX = ".meta.json"


class _File(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    hash: str = ""  # "sha256:<hex>"


class _Meta(msgspec.Struct, frozen=True):
    """As much of a checkpoint's commit marker as is needed here."""

    step: int
    run_id: str = ""
    final: bool = False
    files: tuple[_File, ...] = ()


class _PlainState(msgspec.Struct, frozen=True):
    state: dict[str, Any]


class SavedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One that is whole. `passed_over`: newer ones that are not, and why."""

    path: Path
    step: int
    run_id: str
    passed_over: tuple[str, ...] = ()


def read_checkpoint(path: Path) -> SavedCheckpoint:
    """That one, every byte verified; a plain `{"state": …}` document is one, too.

    InvalidRequestError with all that is wrong with it. Blocks: reads its files.
    """
    try:
        if not path.name.endswith(META_SUFFIX):
            msgspec.json.decode(path.read_bytes(), type=_PlainState)
            return SavedCheckpoint(path=path, step=0, run_id="")
        meta = _read_meta(path)
    except msgspec.MsgspecError as fault:
        raise InvalidRequestError(f"{path} is no checkpoint: {fault}") from fault
    except OSError as fault:
        raise InvalidRequestError(f"{path} cannot be read: {fault.strerror}") from fault
    faults = list(_find_damage(path.parent, meta))
    if faults:
        raise InvalidRequestError(f"the checkpoint {path} is damaged", faults)
    return SavedCheckpoint(path=path, step=meta.step, run_id=meta.run_id)


def newest_checkpoint(folder: Path) -> SavedCheckpoint | None:
    """The newest that is whole; None where none was ever saved. InvalidRequestError where all are damaged. Blocks."""
    passed_over = []
    for path in sorted(folder.glob(f"*{META_SUFFIX}"), key=_age, reverse=True):
        try:
            found = read_checkpoint(path)
        except InvalidRequestError as fault:
            passed_over.append(f"{path.name}: {'; '.join(fault.faults) or fault}")
        else:
            return msgspec.structs.replace(found, passed_over=tuple(passed_over))
    if passed_over:
        raise InvalidRequestError(
            f"no checkpoint in {folder} is whole: name another with --checkpoint, or submit the job anew",
            passed_over,
        )
    return None


def _age(path: Path) -> tuple[int, bool]:
    """Oldest first; a final one comes after its step. One that cannot be read is the newest: it is to be told of."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        meta = _read_meta(path)
        return meta.step, meta.final
    return 1 << 62, True


def _read_meta(path: Path) -> _Meta:
    return msgspec.json.decode(path.read_bytes(), type=_Meta)


def _find_damage(folder: Path, meta: _Meta) -> Iterator[str]:
    for item in meta.files:
        path = folder / item.name
        try:
            size_bytes = path.stat().st_size
            if size_bytes != item.size_bytes:
                yield f"{item.name} has {size_bytes} bytes, was saved with {item.size_bytes}"
            elif item.hash.startswith("sha256:") and _hash(path) != item.hash:
                yield f"{item.name} does not hold what was saved: its hash is another"
        except OSError as fault:
            yield f"{item.name}: {fault.strerror}"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
