"""One save as a sequence of durable steps. Invariant: if the folder had a verified checkpoint, it always has one.

- Data and meta are written under temporary names, synced and renamed. The rename of the meta is the commit.
- A verified checkpoint of the same name is first kept as `<stem>.previous` (a hard link and its own meta), until the
  new one was read back and verified.
- Retention runs last.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gen_worker.contract.checkpoints.choice import META_SUFFIX, CheckpointInfo
from gen_worker.contract.checkpoints.file_check import check_file, check_size
from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry, encode_meta
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import sync_path
from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.screen_repr import name_some
from gen_worker.errors import Cause, CheckpointError
from gen_worker.trainer.checkpoints.files.image import ImageFile, Stretch, compare_with_disk
from gen_worker.trainer.checkpoints.writing.folder import CheckpointFolder
from gen_worker.trainer.checkpoints.writing.messages import Done, SaveRequest

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Save:
    """Performs one SaveRequest. `run` either returns or raises CheckpointError with the folder as it was."""

    def __init__(self, folder: CheckpointFolder, request: SaveRequest, image: Bytes, token: str) -> None:
        self._folder = folder
        self._dir = folder.path
        self._request = request
        self._image = image
        data_name = request.stem + request.suffix
        self._data = self._dir / data_name
        self._meta = self._dir / (request.stem + META_SUFFIX)
        self._data_tmp = self._dir / f"{data_name}.tmp-{token}"
        self._meta_tmp = self._dir / f"{self._meta.name}.tmp-{token}"
        self._author_tmp = Path(request.author_files) if request.author_files else None
        self._author_dir: Path | None = None
        self._replaced: CheckpointInfo | None = None
        self._set_aside: CheckpointInfo | None = None
        self._data_is_placed = False
        self._stretches: list[Stretch] = []

    def run(self, on_durable: Callable[[], None]) -> Done:
        try:
            meta = self._commit()
        except (OSError, CheckpointError) as error:
            self._undo()
            raise self._explain(error) from error
        try:
            sync_path(self._dir)
            failpoint("checkpoint.meta_renamed")
        except OSError as error:  # the rename is done: nothing to undo
            raise self._explain(error) from error
        on_durable()
        self._read_back(meta)
        warnings: list[str] = []
        removed: tuple[str, ...] = ()
        try:
            failpoint("checkpoint.reread")
            self._drop_replaced(meta)
            removed = tuple(self._folder.apply_retention(self._request.stem))
        except OSError as error:
            warnings.append(f"{self._request.stem} is saved, but older files could not be removed: {error}")
        return Done(
            verified=meta.verified,
            reason=meta.reason,
            files=meta.files,
            removed=removed,
            warnings=tuple(warnings),
        )

    def _commit(self) -> CheckpointMeta:
        digest, bad = self._write_data()
        data_entry = FileEntry(name=self._data.name, size_bytes=self._request.size_bytes, hash=digest)
        author_entries = self._place_author_files()
        self._replaced = self._folder.read(self._request.stem)
        self._place_data(data_entry)
        failpoint("checkpoint.data_renamed")
        reason = f"non-finite values in {name_some(bad, 3)}" if bad else ""
        meta = msgspec.structs.replace(
            self._request.meta,
            verified=not bad,
            reason=reason,
            created_ms=time.time_ns() // 1_000_000,
            author_dir=self._author_dir.name if self._author_dir else None,
            files=(data_entry, *author_entries),
        )
        self._write_meta(meta)
        self._meta_tmp.replace(self._meta)  # the commit
        return meta

    def _write_data(self) -> tuple[str, list[str]]:
        """(hash, names of non-finite tensors)."""
        request = self._request
        writer = ImageFile(self._image, request.size_bytes, self._data_tmp, request.crcs, request.floats)
        try:
            digest = writer.hash()
            fd = writer.finish()
            failpoint("checkpoint.data_written")
            os.fsync(fd)
        finally:
            writer.close()
        failpoint("checkpoint.data_synced")
        self._stretches = writer.stretches
        return digest, writer.non_finite

    def _place_author_files(self) -> list[FileEntry]:
        """Sync and hash the files of the author's hook, and rename their folder."""
        if self._author_tmp is None:
            return []
        base = f"{self._request.stem}.files"
        target, number = self._dir / base, 2
        while target.exists():  # of the replaced checkpoint, or left by a crash
            target, number = self._dir / f"{base}-{number}", number + 1
        entries = []
        folders = {self._author_tmp}
        for path in sorted(self._author_tmp.rglob("*")):
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"save_checkpoint wrote {path.relative_to(self._author_tmp)}, which is neither a file nor a folder"
                )
            if path.is_dir():
                folders.add(path)
                continue
            sync_path(path)
            name = f"{target.name}/{path.relative_to(self._author_tmp).as_posix()}"
            entries.append(FileEntry(name=name, size_bytes=path.stat().st_size, hash=hash_file(path)))
        for folder in folders:
            sync_path(folder)
        self._author_tmp.rename(target)
        self._author_dir = target
        failpoint("checkpoint.author_files")
        return entries

    def _place_data(self, entry: FileEntry) -> None:
        old = self._replaced
        if old is not None and old.meta.data == entry and _is_sound(self._data, entry):
            self._data_tmp.unlink()  # the same bytes exist already
            return
        if old is not None:
            self._set_aside = self._folder.set_aside(old)
        failpoint("checkpoint.set_aside")
        self._data_is_placed = True
        self._data_tmp.replace(self._data)
        sync_path(self._dir)

    def _write_meta(self, meta: CheckpointMeta) -> None:
        with self._meta_tmp.open("wb") as file:
            file.write(encode_meta(meta))
            file.flush()
            failpoint("checkpoint.meta_written")
            os.fsync(file.fileno())
        failpoint("checkpoint.meta_synced")

    def _read_back(self, meta: CheckpointMeta) -> None:
        """Read the files from the disk and compare; on a difference, the meta is renamed to `.damaged`."""
        data, *of_the_author = meta.files
        try:
            check_size(self._data, data)
            compare_with_disk(self._data, self._stretches)
            for entry in of_the_author:
                check_file(self._dir / entry.name, entry, from_disk=True)
        except (OSError, CheckpointError) as error:
            damaged = self._meta.with_name(self._meta.name + ".damaged")
            self._meta.replace(damaged)
            sync_path(self._dir)
            raise CheckpointError(
                f"{self._request.stem} did not read back as written ({error}); its meta is now {damaged.name}. "
                "Check the disk. Older checkpoints are unchanged"
            ) from error

    def _drop_replaced(self, meta: CheckpointMeta) -> None:
        """Remove what this save replaced, unless that one is verified and this one is not."""
        if meta.verified:
            self._folder.remove_previous(self._request.stem)
        if self._replaced is not None and self._replaced.data_path != self._data:
            self._replaced.data_path.unlink(missing_ok=True)  # of the other format

    def _undo(self) -> None:
        """Restore the folder. The meta was not renamed."""
        with contextlib.suppress(OSError):  # the first error is reported
            if self._set_aside is not None and self._replaced is not None:
                self._folder.restore(self._set_aside, self._replaced)
            if self._data_is_placed and (self._replaced is None or self._replaced.data_path != self._data):
                self._data.unlink(missing_ok=True)
        for path in (self._data_tmp, self._meta_tmp):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        for folder in (self._author_tmp, self._author_dir):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _explain(self, error: OSError | CheckpointError) -> CheckpointError:
        stem = self._request.stem
        if isinstance(error, CheckpointError):
            return CheckpointError(f"saving {stem} failed: {error}")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return no_space_error(stem, self._request.size_bytes, self._dir)
        return CheckpointError(
            f"saving {stem} in {self._dir} failed: {error.strerror or error}. Older checkpoints are unchanged"
        )


def no_space_error(stem: str, needed_bytes: int, folder: Path) -> CheckpointError:
    free = shutil.disk_usage(folder).free
    error = CheckpointError(
        f"no space left for {stem}: it needs {needed_bytes / 1e6:.1f} MB, {free / 1e6:.1f} MB free in {folder}. "
        "Older checkpoints are unchanged. Free some space, or lower checkpoints.keep_last"
    )
    error.cause = Cause.DISK_FULL
    return error


def _is_sound(path: Path, entry: FileEntry) -> bool:
    try:
        check_file(path, entry)
    except CheckpointError:
        return False
    return True
