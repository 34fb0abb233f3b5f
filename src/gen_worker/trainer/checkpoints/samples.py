"""Samples: the author's hook writes a temporary folder, which is checked, synced and renamed."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from gen_worker.contract.files.durable import sync_path
from gen_worker.errors import TrainStepError

_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-(?P<token>[0-9a-f]+)-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSample:
    path: Path
    step: int
    size_bytes: int


class SampleFolder:
    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token
        self._num_opened = 0

    def clean_up(self) -> None:
        """Remove temporary folders of crashed attempts."""
        self._path.mkdir(parents=True, exist_ok=True)
        for path in list(self._path.iterdir()):
            match = _TEMPORARY.fullmatch(path.name)
            if match and match["token"] != self._token:
                shutil.rmtree(path, ignore_errors=True)

    def has(self, step: int) -> bool:
        return (self._path / f"step-{step:08d}").exists()

    def open(self, step: int) -> Path:
        self._num_opened += 1
        path = self._path / f"step-{step:08d}.tmp-{self._token}-{self._num_opened}"
        path.mkdir(parents=True)
        return path

    def commit(self, step: int, produced: Path, *, is_complete: bool = False) -> list[SavedSample]:
        """Rename `produced`; the samples in it, by name. Without a file it is removed, unless `is_complete`."""
        files = sorted(path for path in produced.rglob("*") if path.is_file())
        empty = [path.relative_to(produced).as_posix() for path in files if path.stat().st_size == 0]
        if empty:
            shutil.rmtree(produced, ignore_errors=True)
            raise TrainStepError(
                f"the sample hook wrote an empty file at step {step}: {', '.join(empty)}; "
                "close or flush every file before the hook returns"
            )
        if not files and not is_complete:
            shutil.rmtree(produced, ignore_errors=True)
            return []
        for path in [*files, *(path for path in produced.rglob("*") if path.is_dir()), produced]:
            sync_path(path)
        target = self._path / f"step-{step:08d}"
        if target.exists():  # of an earlier attempt
            self._num_opened += 1
            old = self._path / f"{target.name}.tmp-{self._token}-{self._num_opened}"
            target.rename(old)
            produced.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            produced.rename(target)
        sync_path(self._path)
        moved = [target / path.relative_to(produced) for path in files]
        return [SavedSample(path=path, step=step, size_bytes=path.stat().st_size) for path in moved]
