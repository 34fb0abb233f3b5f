"""What is served or predicted with, as files of its own: a checkpoint by hard links, its code as a copy.

The run that saved a checkpoint may remove it at its next save, and a person may remove the run. A server that is started
again needs both, and so does a rollback. A checkpoint of another file system cannot be linked: it is used where it is.

    models/<digest of the meta>/step-00000400.meta.json, step-00000400.pt
    models/code/<digest of the snapshot>/
"""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from gen_worker.contract.checkpoints.choice import CheckpointInfo
from gen_worker.contract.files.durable import make_folder, sync_path
from gen_worker.contract.files.hashes import hash_file
from trn.core.snapshots import materialise

CODE = "code"
GRACE_S = 3600.0  # what was kept so recently may be of a submit that is under way
_NEW = ".new-"
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


class ModelStore:
    """One for a home. Its calls block."""

    def __init__(self, root: Path, snapshots: Path) -> None:
        self._root = root
        self._snapshots = snapshots

    def keep(self, info: CheckpointInfo) -> Path:
        """The meta of the same checkpoint in the store, durably; where it cannot be linked, the given one."""
        digest = info.meta.digest or hash_file(info.meta_path)
        place = self._root / digest.rpartition(":")[2][:32]
        if (place / info.meta_path.name).exists():
            os.utime(place)
            return place / info.meta_path.name
        make_folder(self._root)
        new = Path(tempfile.mkdtemp(dir=self._root, prefix=_NEW))
        try:
            for source in _files_of(info):
                target = new / source.relative_to(info.meta_path.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.hardlink_to(source)
                sync_path(target.parent)
            with contextlib.suppress(FileExistsError):  # another call was quicker
                _rename(new, place)
            sync_path(self._root)
        except OSError as fault:
            if fault.errno not in _NO_LINKS:
                raise
            return info.meta_path
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return place / info.meta_path.name

    def keep_code(self, snapshot: str) -> Path:
        """The folder with exactly that code. NotFoundError where the snapshot is gone."""
        place = self._root / CODE / snapshot.rpartition(":")[2]
        make_folder(place.parent)
        materialise(self._snapshots, snapshot, place)
        os.utime(place)
        return place

    def unused(self, needed: Collection[str], *, grace_s: float = GRACE_S) -> list[Path]:
        """Folders of which none of these texts, configs say, has the path. None that was kept just now."""
        before_s = time.time() - grace_s
        return [
            path
            for folder in (self._root, self._root / CODE)
            for path in _list(folder)
            if path != self._root / CODE
            and path.lstat().st_mtime < before_s
            and not any(str(path) in text for text in needed)
        ]


def _files_of(info: CheckpointInfo) -> list[Path]:
    folder = info.meta_path.parent
    files = {folder / entry.name for entry in info.meta.files}
    if info.meta.author_dir:
        files |= {path for path in (folder / info.meta.author_dir).rglob("*") if path.is_file()}
    return [*sorted(files), info.meta_path]


def _rename(new: Path, place: Path) -> None:
    try:
        new.rename(place)
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise FileExistsError(fault.errno, "there already", str(place)) from fault


def _list(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []
