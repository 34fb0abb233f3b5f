"""Opens the files of artifacts. Daemon, gateway and commands all use this.

A file is opened below the run's folder one name at a time, and no name may be a link: what a worker puts in place of a
folder or a file leads nowhere else. The stamp of a file that was hashed tells whether it is still that file. All of this
blocks.
"""

import errno
import os
import stat
from pathlib import Path, PurePosixPath

from gen_worker.contract.checkpoints.choice import META_SUFFIX
from gen_worker.contract.checkpoints.meta import FileEntry, parse_meta
from gen_worker.contract.files.hashes import hash_descriptor
from gen_worker.contract.files.mp4 import is_whole_mp4
from gen_worker.contract.files.regular import kind_of_mode
from gen_worker.errors import CheckpointError
from trn.core.artifacts.records import ArtifactRecord, ArtifactState, CheckedFile
from trn.core.causes import Cause
from trn.core.errors import ConflictError, NotFoundError
from trn.core.home import Home

MAX_PATH = 4096
MAX_META_BYTES = 256 << 20
# Of this process, not of the file: asking again may help.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class RefusedFileError(Exception):
    """The file is not taken as an artifact; `cause` is why, as data."""

    def __init__(self, id: str, **values: object) -> None:  # noqa: A002
        super().__init__(id)
        self.cause = Cause(id=id, fault="job", values=values)


def open_artifact(home: Home, artifact: ArtifactRecord) -> int:
    """A descriptor of the file that was taken in, open for reading.

    NotFoundError where there is none any more; ConflictError where other bytes are in its place. Where only its times or
    its place on the disk differ, as after a copy of the home, it is hashed.
    """
    _require_present(artifact)
    try:
        fd = open_below(home.run(artifact.run_id).root, artifact.path)
    except FileNotFoundError as fault:
        raise NotFoundError(f"the file of artifact {artifact.artifact_id} was deleted") from fault
    except RefusedFileError as fault:
        raise changed_error(artifact) from fault
    try:
        require_unchanged(fd, artifact)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_unchanged(fd: int, artifact: ArtifactRecord) -> None:
    """ConflictError where the open file is not the one that was taken in."""
    found = os.fstat(fd)
    if found.st_size != artifact.size_bytes:
        raise changed_error(artifact)
    if stamp_of(found) != artifact.stamp and _hash(fd) != artifact.sha256:
        raise changed_error(artifact)


def changed_error(artifact: ArtifactRecord) -> ConflictError:
    return ConflictError(
        f"the file of artifact {artifact.artifact_id} changed after it was recorded: expected {artifact.size_bytes} bytes"
        f" with SHA-256 {artifact.sha256[:12]}…"
    )


def find_checkpoint_meta(home: Home, artifact: ArtifactRecord) -> Path:
    """The `.meta.json` of a checkpoint, to resume from. NotFoundError where it is not there any more."""
    _require_present(artifact)
    if artifact.kind != "checkpoint":
        raise NotFoundError(f"artifact {artifact.artifact_id} is a {artifact.kind}, expected a checkpoint")
    root = home.run(artifact.run_id).root
    if not is_there(root, artifact.kind, artifact.path):
        raise NotFoundError(f"the checkpoint of artifact {artifact.artifact_id} was deleted")
    return root / _meta_of(artifact.path)


def is_there(root: Path, kind: str, path: str) -> bool:
    """Whether a file exists below a run's folder; of a checkpoint also its meta file. Does not read them."""
    names = [path, _meta_of(path)] if kind == "checkpoint" else [path]
    return all(os.path.lexists(root / name) for name in names)


def check_file(home: Home, artifact: ArtifactRecord, nonce: str, *, may_be_gone: bool) -> CheckedFile:
    """Look at a file that an event named: where it is, what it is, whether it is whole; and hash it.

    `may_be_gone`: retention may have removed it since. OSError where the shortage is ours: try again.
    """
    path = artifact.path
    root = home.run(artifact.run_id).root
    try:
        path = locate(root, artifact.path)
        size_bytes, sha256, stamp = _check_readable(root, path, artifact, nonce)
    except RefusedFileError as fault:
        is_gone = fault.cause.id == "artifact-missing" and may_be_gone
        return CheckedFile(
            artifact_id=artifact.artifact_id,
            state=ArtifactState.REMOVED if is_gone else ArtifactState.REFUSED,
            path=path,
            size_bytes=artifact.size_bytes,
            cause=Cause() if is_gone else fault.cause,
        )
    return CheckedFile(
        artifact_id=artifact.artifact_id,
        state=ArtifactState.PRESENT,
        path=path,
        size_bytes=size_bytes,
        sha256=sha256,
        stamp=stamp,
    )


def locate(root: Path, named: str) -> str:
    """A path that an event names, relative to the run's folder. RefusedFileError where it leads elsewhere."""
    path = PurePosixPath(named)
    if path.is_absolute():
        for folder in (root, root.resolve()):
            if path.is_relative_to(folder):
                path = path.relative_to(folder)
                break
    is_inside = not path.is_absolute() and ".." not in path.parts and bool(path.parts)
    if not is_inside or "\0" in named or len(named) > MAX_PATH:
        raise RefusedFileError("artifact-outside")
    return str(path)


def open_below(root: Path, relative: str) -> int:
    """A regular file below a folder, open for reading. FileNotFoundError; RefusedFileError for everything else."""
    *folders, name = PurePosixPath(relative).parts
    try:
        place = os.open(root, _DIRECTORY)
        try:
            for folder in folders:
                _require_kind(folder, place, stat.S_IFDIR)
                below = os.open(folder, _DIRECTORY, dir_fd=place)
                os.close(place)
                place = below
            _require_kind(name, place, stat.S_IFREG)  # opening a device may have an effect
            fd = os.open(name, _FILE, dir_fd=place)
        finally:
            os.close(place)
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise _as_refusal(fault) from fault
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RefusedFileError("artifact-not-file", found="something else")
    return fd


def stamp_of(found: os.stat_result) -> str:
    """Changes with any write to the file, and with another file in its place."""
    return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def _require_present(artifact: ArtifactRecord) -> None:
    if not artifact.is_present:
        why = f": {artifact.reason}" if artifact.reason else ""
        raise NotFoundError(
            f"artifact {artifact.artifact_id} ({artifact.name!r}) has no file: it is {artifact.state}{why}"
        )


def _require_kind(name: str, place: int, kind: int) -> None:
    mode = os.stat(name, dir_fd=place, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        raise RefusedFileError("artifact-link", part=name)
    if stat.S_IFMT(mode) != kind:
        what = "a regular file" if kind == stat.S_IFREG else "a folder"
        raise RefusedFileError("artifact-not-file", part=name, found=kind_of_mode(mode), expected=what)


def _as_refusal(fault: OSError) -> Exception:
    """The fault itself where it is ours."""
    if fault.errno in _SHORTAGES:
        return fault
    return RefusedFileError("artifact-unreadable", error=fault.strerror or str(fault))


def _check_readable(root: Path, path: str, artifact: ArtifactRecord, nonce: str) -> tuple[int, str, str]:
    try:
        return _check(root, path, artifact, nonce)
    except OSError as fault:  # of a disk that cannot be read, say
        raise _as_refusal(fault) from fault


def _check(root: Path, path: str, artifact: ArtifactRecord, nonce: str) -> tuple[int, str, str]:
    """(size, SHA-256, stamp) of the whole file."""
    try:
        fd = open_below(root, path)
    except FileNotFoundError as fault:
        raise RefusedFileError("artifact-missing") from fault
    try:
        before = os.fstat(fd)
        size_bytes = before.st_size
        if not size_bytes:
            raise RefusedFileError("artifact-empty")
        if artifact.kind == "checkpoint":
            entry = _read_entry(root, path, nonce)
            _require_size(size_bytes, entry.size_bytes)
            return size_bytes, entry.hash.removeprefix("sha256:"), stamp_of(before)
        if artifact.size_bytes:
            _require_size(size_bytes, artifact.size_bytes)
        if PurePosixPath(path).suffix.lower() == ".mp4" and not is_whole_mp4(fd, size_bytes):
            raise RefusedFileError("artifact-half-written", size_bytes=size_bytes)
        sha256 = _hash(fd)
        if stamp_of(os.fstat(fd)) != stamp_of(before):
            raise RefusedFileError("artifact-changing")
    finally:
        os.close(fd)
    return size_bytes, sha256, stamp_of(before)


def _require_size(found: int, expected: int) -> None:
    if found != expected:
        raise RefusedFileError("artifact-incomplete", size_bytes=found, expected_bytes=expected)


def _read_entry(root: Path, path: str, nonce: str) -> FileEntry:
    """What the checkpoint's meta file says of its data file."""
    meta_path = _meta_of(path)
    try:
        fd = open_below(root, meta_path)
    except FileNotFoundError as fault:
        raise RefusedFileError("artifact-missing") from fault  # the marker goes first
    with os.fdopen(fd, "rb", buffering=0) as file:
        if os.fstat(fd).st_size > MAX_META_BYTES:
            raise RefusedFileError("artifact-no-checkpoint", error=f"{meta_path} is too large")
        content = file.readall()
    try:
        meta = parse_meta(content, meta_path)
    except CheckpointError as fault:
        raise RefusedFileError("artifact-no-checkpoint", error=str(fault)) from fault
    if meta.nonce != nonce or meta.data.name != PurePosixPath(path).name:
        raise RefusedFileError(
            "artifact-no-checkpoint", error=f"{meta_path} is of another submission or file"
        )
    return meta.data


def _meta_of(path: str) -> str:
    data = PurePosixPath(path)
    return str(data.with_name(data.stem + META_SUFFIX))


def _hash(fd: int) -> str:
    return hash_descriptor(fd).removeprefix("sha256:")
