"""Compares the files of a checkpoint with the sizes and hashes in its meta. Needs neither torch nor numpy."""

from pathlib import Path

from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry
from gen_worker.contract.files.hashes import hash_file
from gen_worker.errors import CheckpointError


def check_size(path: Path, entry: FileEntry) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    if size != entry.size_bytes:
        what = "truncated" if size < entry.size_bytes else "too long"
        raise CheckpointError(f"{entry.name} is {what}: {size} bytes, its meta says {entry.size_bytes}")


def check_file(path: Path, entry: FileEntry, *, from_disk: bool = False) -> None:
    """Size and hash, or CheckpointError."""
    check_size(path, entry)
    try:
        found = hash_file(path, from_disk=from_disk)
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be read: {error.strerror}") from error
    compare_hash(entry, found)


def compare_hash(entry: FileEntry, found: str) -> None:
    if found != entry.hash:
        raise CheckpointError(f"hash mismatch: {entry.name} is {found}, its meta says {entry.hash}")


def is_intact(folder: Path, meta: CheckpointMeta) -> bool:
    """Whether every file exists and matches its hash."""
    try:
        for entry in meta.files:
            check_file(folder / entry.name, entry)
    except CheckpointError:
        return False
    return True
