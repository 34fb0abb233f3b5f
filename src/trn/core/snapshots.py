"""The store of code snapshots: content by its hash, a snapshot by its manifest.

    objects/<aa>/<sha256>     the bytes of a file, read-only, never changed
    manifests/<digest>.json   which paths hold which bytes
    stat-cache/               what a client knows of its files without reading them
    staging/                  what is being written; nothing there is ever read
    lock                      held shared while a snapshot is taken, alone while garbage is collected

Everything is written aside, synced and renamed, so a process killed at any point leaves nothing half visible. The
digest says what the code is and nothing else: equal content has one digest, whenever and from whichever commit it
was taken.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from gen_worker.contract.files.durable import sync_path
from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.files.regular import NotRegularFileError, open_regular, read_regular
from gen_worker.contract.process_identity import is_process_alive
from trn.core.errors import InvalidRequestError, NotFoundError, UnavailableError
from trn.core.snapshot_manifest import DIGEST, FileEntry, Manifest, check_manifest

SMALL_BYTES = 4 << 20  # read whole; beyond it, in pieces
GRACE_S = 3600.0  # from a snapshot's taking until the registry knows its run
TOUCH_S = 60.0  # an object newer than this is new enough
UNUSED_S = 30 * 86400.0  # a stat cache that was not written for so long belongs to a folder that is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    sha256: str
    size_bytes: int
    found: os.stat_result | None = None  # of the file it was read from, taken before the first byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    num_manifests: int = 0
    num_objects: int = 0
    freed_bytes: int = 0
    warning: str = ""


class SnapshotStore:
    """One store. Its calls block; several processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "objects"
        self.manifests = root / "manifests"
        self.staging = root / "staging"
        self.stat_cache = root / "stat-cache"

    def make(self) -> None:
        for folder in (self.root, self.objects, self.manifests, self.staging, self.stat_cache):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def adding(self) -> Iterator[None]:
        """Hold off the garbage collector: what is found or put inside stays until its manifest is there."""
        self.make()
        with _locked(self.root / "lock", fcntl.LOCK_SH):
            yield

    def object_path(self, sha256: str) -> Path:
        return self.objects / sha256[:2] / sha256

    def has(self, sha256: str, size_bytes: int) -> bool:
        """Whether it is there whole; if so it counts as new for the garbage collector."""
        name = f"{self.root}/objects/{sha256[:2]}/{sha256}"  # asked for every file of every snapshot: no Path
        try:
            found = os.stat(name)  # noqa: PTH116
            if time.time() - found.st_mtime > TOUCH_S:
                os.utime(name)
        except FileNotFoundError:
            return False
        return found.st_size == size_bytes

    def put_bytes(self, data: bytes) -> StoredFile:
        """Durable when it returns, but for its name: `put_manifest` sees to that."""
        sha256 = hashlib.sha256(data).hexdigest()
        with self._writing():
            if not self.has(sha256, len(data)):
                with self._staged() as file:
                    file.write(data)
                    self._place(file, self.object_path(sha256))
        return StoredFile(sha256=sha256, size_bytes=len(data))

    def put_file(self, path: Path, *, inspect: Callable[[bytes], None] = lambda _piece: None) -> StoredFile:
        """Store what is read from it, and say what that was: it may change meanwhile.

        Raises OSError of the file itself; UnavailableError where the store cannot be written. `inspect` gets what is
        stored, piece by piece; where it raises, nothing is.
        """
        with os.fdopen(open_regular(path), "rb", buffering=0) as source:
            found = os.fstat(source.fileno())
            if found.st_size <= SMALL_BYTES:
                data = source.readall()
                inspect(data)
                stored = self.put_bytes(data)
            else:
                stored = self._put_stream(source, path, inspect)
        return StoredFile(sha256=stored.sha256, size_bytes=stored.size_bytes, found=found)

    def _put_stream(self, source: IO[bytes], path: Path, inspect: Callable[[bytes], None]) -> StoredFile:
        hashed = hashlib.sha256()
        size_bytes = 0
        with self._writing(), self._staged() as file:
            while piece := _read(source, path):
                inspect(piece)
                hashed.update(piece)
                file.write(piece)
                size_bytes += len(piece)
            sha256 = hashed.hexdigest()
            if not self.has(sha256, size_bytes):
                self._place(file, self.object_path(sha256))
        return StoredFile(sha256=sha256, size_bytes=size_bytes)

    def put_manifest(self, manifest: Manifest) -> str:
        """Its digest. Its objects must be there. Where git tells another story than before, the newest is kept."""
        digest = manifest.digest
        check_manifest(manifest, digest)
        path = self.manifests / f"{digest}.json"
        with contextlib.suppress(NotFoundError, InvalidRequestError):
            known = self.manifest(digest)
            if known.git == manifest.git:
                os.utime(path)
                return digest
        named = {file.sha256 for file in manifest.files}
        if manifest.git is not None and manifest.git.diff:
            named.add(manifest.git.diff)
        with self._writing():
            for folder in {self.object_path(sha256).parent for sha256 in named}:
                sync_path(folder)
            for folder in (self.objects, self.root, self.root.parent):
                sync_path(folder)
            with self._staged() as file:
                file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                self._place(file, path)
            sync_path(self.manifests)
        return digest

    def manifest(self, digest: str) -> Manifest:
        """The manifest of a snapshot, checked. NotFoundError where there is none."""
        if not DIGEST.match(digest):
            raise InvalidRequestError(f"{digest!r} is no digest of a snapshot: expected 64 hex digits")
        try:
            manifest = msgspec.json.decode(
                read_regular(self.manifests / f"{digest}.json"), type=Manifest, strict=True
            )
        except FileNotFoundError:
            raise NotFoundError(f"no snapshot {digest} in {self.root}: submit the run again") from None
        except msgspec.MsgspecError as fault:
            raise InvalidRequestError(f"the manifest of snapshot {digest} is damaged: {fault}") from fault
        check_manifest(manifest, digest)
        return manifest

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as fault:
            raise UnavailableError(
                f"the snapshot store {self.root} cannot be written: {fault.strerror}"
            ) from fault

    @contextlib.contextmanager
    def _staged(self) -> Iterator[IO[bytes]]:
        """A new file aside, gone afterwards unless it was placed."""
        with tempfile.NamedTemporaryFile(dir=self.staging, delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def _place(self, file: IO[bytes], path: Path) -> None:
        file.flush()
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())
        path.parent.mkdir(mode=0o700, exist_ok=True)
        Path(file.name).replace(path)


def materialise(store: Path, digest: str, target: Path) -> None:
    """Make `target` a folder with exactly that code, in writable copies; every hash is verified on the way.

    Repeatable: a folder that holds the code already is left alone, one that was edited or damaged is replaced.
    """
    snapshots = SnapshotStore(store)
    manifest = snapshots.manifest(digest)
    if _holds(target, manifest):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-{os.getpid()}-"))
    try:
        code = aside / "new"
        code.mkdir()
        for folder in manifest.folders():
            (code / folder).mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            _copy(f"{store}/objects/{file.sha256[:2]}/{file.sha256}", f"{code}/{file.path}", file, digest)
        for link in manifest.symlinks:  # last: nothing is ever written through one
            (code / link.path).symlink_to(link.target)
        if target.is_symlink() or target.exists():
            target.rename(aside / "old")
        try:
            code.rename(target)
        except OSError:
            if not _holds(target, manifest):  # else another was quicker
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def collect_garbage(
    store: Path, keep: set[str], *, grace_s: float = GRACE_S, is_dry_run: bool = False
) -> Collected:
    """Remove the snapshots that are neither kept nor younger than the grace, and the objects that none names.

    Does nothing, and says so, while a snapshot is being taken. A dry run says what it would remove.
    """
    snapshots = SnapshotStore(store)
    if not store.is_dir():
        return Collected()
    snapshots.make()
    old = time.time() - grace_s
    try:
        with _locked(store / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            return _collect(snapshots, keep, old, is_dry_run=is_dry_run)
    except BlockingIOError:
        return Collected(warning="a snapshot is being taken; the garbage waits for the next time")


def _collect(snapshots: SnapshotStore, keep: set[str], old: float, *, is_dry_run: bool) -> Collected:
    remove = _measure if is_dry_run else _remove
    removed: list[tuple[Path, int]] = []
    named: set[str] = set()
    warning = ""
    for path in snapshots.manifests.glob("*.json"):
        if path.stem not in keep and path.stat().st_mtime < old:
            removed.append(remove(path))
            continue
        try:
            manifest = snapshots.manifest(path.stem)
        except InvalidRequestError as fault:
            warning = f"no object was removed, for it may belong to this one: {fault}"
            continue
        named |= {file.sha256 for file in manifest.files}
        if manifest.git is not None:
            named.add(manifest.git.diff)
    num_manifests = len(removed)
    # Manifests first, for good: a crash from here on leaves objects without a manifest, never the reverse.
    sync_path(snapshots.manifests)
    if not warning:
        for path in snapshots.objects.glob("*/*"):
            if path.name not in named and path.stat().st_mtime < old:
                removed.append(remove(path))
    for folder, limit in ((snapshots.staging, old), (snapshots.stat_cache, old - UNUSED_S)):
        for path in folder.iterdir():
            if path.stat().st_mtime < limit:
                remove(path)
    return Collected(
        num_manifests=num_manifests,
        num_objects=len(removed) - num_manifests,
        freed_bytes=sum(size_bytes for _, size_bytes in removed),
        warning=warning,
    )


def _measure(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_size


def _remove(path: Path) -> tuple[Path, int]:
    size_bytes = path.stat().st_size
    path.unlink()
    return path, size_bytes


def _copy(source: str, target: str, file: FileEntry, digest: str) -> None:
    try:
        have = open_regular(source)
    except (FileNotFoundError, NotRegularFileError) as fault:
        raise NotFoundError(
            f"snapshot {digest} has lost {file.path!r} ({file.sha256}): submit the run again"
        ) from fault
    try:
        want = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, file.mode)
        try:
            sha256 = _copy_small(have, want) if file.size_bytes <= SMALL_BYTES else _copy_large(have, want)
        finally:
            os.close(want)
    finally:
        os.close(have)
    if sha256 != file.sha256:
        raise InvalidRequestError(
            f"snapshot {digest}: the stored bytes of {file.path!r} are damaged (expected {file.sha256}, found"
            f" {sha256}): remove {source} and submit the run again"
        )


def _copy_small(have: int, want: int) -> str:
    data = os.read(have, SMALL_BYTES + 1)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(want, rest) :]
    return hashlib.sha256(data).hexdigest()


def _copy_large(have: int, want: int) -> str:
    """In the kernel, which shares the blocks where the file system can; a copy either way. Hashes what was written."""
    try:
        while os.copy_file_range(have, want, 1 << 30):
            pass
    except (OSError, AttributeError):
        os.lseek(have, 0, os.SEEK_SET)
        os.lseek(want, 0, os.SEEK_SET)
        os.truncate(want, 0)
        while piece := os.read(have, 1 << 20):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(want, rest) :]
    os.lseek(want, 0, os.SEEK_SET)
    with os.fdopen(os.dup(want), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(source: IO[bytes], path: Path) -> bytes:
    """The next piece. A fault here is the file's own, not the store's."""
    try:
        return source.read(1 << 20)
    except OSError as fault:
        raise InvalidRequestError(f"{path} cannot be read: {fault.strerror}") from fault


def _holds(target: Path, manifest: Manifest) -> bool:
    """Whether every entry is there as it was stored; what else is there does not matter."""
    try:
        return all(
            stat.S_ISREG((found := os.lstat(f"{target}/{file.path}")).st_mode)
            and found.st_size == file.size_bytes
            and bool(found.st_mode & 0o100) == bool(file.mode & 0o100)
            and hash_file(target / file.path, follow=False) == f"sha256:{file.sha256}"
            for file in manifest.files
        ) and (
            target.is_dir()
            and all((target / link.path).readlink() == Path(link.target) for link in manifest.symlinks)
        )
    except OSError:
        return False


def _remove_leftovers(target: Path) -> None:
    """What a killed process left beside it."""
    for path in target.parent.glob(f".{target.name}-*-*"):
        pid = path.name.removeprefix(f".{target.name}-").split("-")[0]
        if not pid.isdigit() or not is_process_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
