"""Changes in the checkpoints folder: set aside, restore, remove, clean up after a crash. Needs the run's lease.

Files that are not ours by name are left alone.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import msgspec

from gen_worker.contract.checkpoints.choice import (
    DATA_SUFFIXES,
    META_SUFFIX,
    STEM,
    CheckpointInfo,
    find_committed,
    read_info,
    scan,
)
from gen_worker.contract.checkpoints.file_check import is_intact
from gen_worker.contract.checkpoints.meta import encode_meta
from gen_worker.contract.checkpoints.retention import candidate_of, select_removals
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replace_file, sync_path
from gen_worker.errors import CheckpointError

PREVIOUS = ".previous"
_TEMPORARY = re.compile(
    r"(?:step-\d{8,}|final)\..*tmp-(?P<token>[0-9a-f]+)(?:-\d+)?|\.(?:step-\d{8,}|final)\..*\.tmp"
)
_AUTHOR_DIR = re.compile(r"(?P<stem>step-\d{8,}|final)\.files(?:-\d+)?")


class CheckpointFolder:
    def __init__(self, path: Path, *, keep_last: int, keep_best: int) -> None:
        self.path = path
        self._keep_last = keep_last
        self._keep_best = keep_best

    def read(self, stem: str) -> CheckpointInfo | None:
        """The checkpoint of this name. An unreadable one is renamed, not replaced."""
        meta_path = self.path / (stem + META_SUFFIX)
        if not meta_path.exists():
            return None
        try:
            return read_info(self.path, stem)
        except CheckpointError:
            number = 1
            while (kept := meta_path.with_name(f"{meta_path.name}.unreadable-{number}")).exists():
                number += 1
            for suffix in DATA_SUFFIXES:
                data = self.path / (stem + suffix)
                if data.exists():
                    data.rename(data.with_name(f"{data.name}.unreadable-{number}"))
            meta_path.rename(kept)
            return None

    def set_aside(self, old: CheckpointInfo) -> CheckpointInfo | None:
        """Give a verified checkpoint a second name, so that the first can be replaced."""
        if not old.verified or not is_intact(self.path, old.meta):
            return None  # an earlier `.previous` stays
        stem = old.stem + PREVIOUS
        self.remove_previous(old.stem)
        data = self.path / (stem + old.data_path.suffix)
        try:
            os.link(old.data_path, data)
        except OSError:  # a file system without hard links
            shutil.copyfile(old.data_path, data)
            sync_path(data)
        first, *others = old.meta.files
        meta = msgspec.structs.replace(
            old.meta, files=(msgspec.structs.replace(first, name=data.name), *others)
        )
        sync_path(self.path)
        replace_file(self.path / (stem + META_SUFFIX), encode_meta(meta, with_digest=bool(old.meta.digest)))
        return read_info(self.path, stem)

    def restore(self, aside: CheckpointInfo, old: CheckpointInfo) -> None:
        """Undo `set_aside`: the data gets its first name back."""
        aside.data_path.replace(old.data_path)
        sync_path(self.path)
        aside.meta_path.unlink(missing_ok=True)
        # A rename of one hard link over another does nothing.
        aside.data_path.unlink(missing_ok=True)

    def remove_previous(self, stem: str) -> None:
        (self.path / (stem + PREVIOUS + META_SUFFIX)).unlink(missing_ok=True)
        for suffix in DATA_SUFFIXES:
            (self.path / (stem + PREVIOUS + suffix)).unlink(missing_ok=True)

    def apply_retention(self, just_saved: str) -> list[str]:
        """Remove what `select_removals` names, the meta first.

        Checkpoints beyond the step just saved (a resume passed over them) and those of other runs stay uncounted.
        """
        found, _ = scan(self.path)
        saved = next((info for info in found if info.stem == just_saved), None)
        reached = -1 if saved is None else saved.step
        infos = {
            info.stem: info
            for info in found
            if info.step <= reached and saved is not None and _saver(info) == _saver(saved)
        }
        candidates = [candidate_of(info) for info in infos.values()]
        removed = select_removals(candidates, keep_last=self._keep_last, keep_best=self._keep_best)
        for stem in removed:
            info = infos[stem]
            info.meta_path.unlink(missing_ok=True)
            failpoint("checkpoint.retention")
            info.data_path.unlink(missing_ok=True)
        self._sweep_orphans()
        return removed

    def clean_up(self, token: str) -> None:
        """At a writer's start: finish what a crash interrupted. `token` marks folders in use."""
        for path in list(self.path.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or (path.is_dir() and match["token"] == token):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for name in find_committed(self.path):
            if name.endswith(PREVIOUS + META_SUFFIX):
                self._settle(name.removesuffix(PREVIOUS + META_SUFFIX))
        self._sweep_orphans()

    def _settle(self, stem: str) -> None:
        """A save that replaced `stem` did not finish: keep the valid one of the two."""
        try:
            aside = read_info(self.path, stem + PREVIOUS)
            current = read_info(self.path, stem)
        except CheckpointError:
            return  # `.previous` stays, as a checkpoint of its own
        if is_intact(self.path, current.meta):
            if current.verified or not aside.verified:
                self.remove_previous(stem)
        elif current.meta.data.hash == aside.meta.data.hash and is_intact(self.path, aside.meta):
            self.restore(aside, current)

    def _sweep_orphans(self) -> None:
        """Remove data and author folders that no meta names, left by an interrupted save or removal.

        Only if ours by name, older than the newest verified checkpoint, and without an unreadable meta.
        """
        infos, _ = scan(self.path)
        newest = max((info.step for info in infos if info.verified), default=-1)
        named = {info.data_path.name for info in infos} | {info.meta.author_dir for info in infos}
        stems = {info.stem for info in infos}
        names = {path.name for path in self.path.iterdir()}
        for name in names - named:
            path = self.path / name
            data = STEM.fullmatch(path.stem) if path.suffix in DATA_SUFFIXES else None
            folder = _AUTHOR_DIR.fullmatch(name)
            stem = path.stem if data else folder["stem"] if folder else ""
            if not stem or any(other.startswith(stem + META_SUFFIX) for other in names if stem not in stems):
                continue
            if data and stem not in stems and (data["previous"] or int(data["step"] or newest) < newest):
                with contextlib.suppress(OSError):  # a folder of that name: it stays
                    path.unlink()
            elif folder:
                shutil.rmtree(path, ignore_errors=True)


def _saver(info: CheckpointInfo) -> tuple[str, str]:
    return info.meta.run_id, info.meta.nonce
