"""A content-addressed cache of downloads, shared by any number of workers.

<root>/sha256/ab/<hex>         the bytes; read-only, in place by rename, never changed
<root>/index/<key>.json        the last state of a ref: validator -> digest
<root>/partial/<key>[.json]    an unfinished download, and how much of it is synced
<root>/locks/<key>             one flock per key: one worker downloads, the others wait
<root>/folders/<key>/...       files of one folder under their own names (links)
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replace_file, sync_path, temporary_path
from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.sizes import show_bytes

HASH_CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.2
MIN_FREE_BYTES = 64 << 20
MAX_RECORD_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

R = TypeVar("R", bound=msgspec.Struct)


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The last state of a ref: the server's validator and the bytes."""

    version: int = 1
    ref: str = ""  # for people, without secrets
    validator: str
    digest: str
    size_bytes: int


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The synced part of a partial download."""

    synced_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    validator: str = ""
    total_bytes: int | None = None


def key_of(text: str) -> str:
    """A file name for a ref; refs may hold secrets, so names are hashes."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class InputCache:
    """Thread-safe and process-safe; files are added whole."""

    def __init__(
        self,
        root: Path,
        *,
        sync_every_bytes: int = 32 << 20,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root.absolute()
        self.sync_every_bytes = sync_every_bytes
        self._sleep = sleep

    def blob_path(self, digest: str) -> Path:
        digits = digest.removeprefix("sha256:")
        return self.root / "sha256" / digits[:2] / digits

    def find(self, digest: str, *, size_bytes: int | None, rehash: bool) -> Path | None:
        """The blob of `digest` if it is cached and valid.

        A corrupt one is kept: a worker may be reading it, and the next commit replaces it.
        """
        if not _DIGEST.fullmatch(digest):
            return None
        path = self.blob_path(digest)
        try:
            status = path.lstat()  # the cache holds no links and FIFOs
            if not stat.S_ISREG(status.st_mode) or size_bytes not in (None, status.st_size):
                return None
            is_sound = not rehash or hash_file(path) == digest
        except FileNotFoundError:
            return None
        return path if is_sound else None

    def require_room(self, more_bytes: int = 0) -> None:
        """OSError (ENOSPC) if the disk would have less than `MIN_FREE_BYTES` left."""
        self.root.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes - more_bytes < MIN_FREE_BYTES:
            needed = f"{show_bytes(more_bytes)} more" if more_bytes else "more"
            raise OSError(
                errno.ENOSPC,
                f"the download needs {needed}, but only {show_bytes(free_bytes)} are free and"
                f" {show_bytes(MIN_FREE_BYTES)} are reserved",
                str(self.root),
            )

    @contextlib.contextmanager
    def locked(self, key: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock of `key`. `on_wait` is called while another worker holds it, and may raise to stop waiting."""
        path = self._in("locks", key)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if on_wait is not None:
                        on_wait()
                    self._sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def recall(self, key: str) -> IndexEntry | None:
        return _read_record(self._in("index", f"{key}.json"), IndexEntry)

    def remember(self, key: str, entry: IndexEntry) -> None:
        _write_record(self._in("index", f"{key}.json"), entry)

    def partial(self, key: str) -> "PartialDownload":
        """The unfinished download of `key`; hold its lock."""
        return PartialDownload(self, self._in("partial", key))

    def place(self, files: Mapping[str, str]) -> Path:
        """A folder of blobs: relative name -> digest. Equal content gives the same folder."""
        listing = json.dumps(sorted(files.items()))
        folder = self.root / "folders" / key_of(listing)[:32]
        for name, digest in files.items():
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self.blob_path(digest), link.parent)
            # A relative link, renamed into place: the cache may be moved, and two workers may do this.
            temporary = temporary_path(link.with_name("link"))  # the name may be as long as names can be
            temporary.symlink_to(target)
            temporary.replace(link)
        return folder

    def _in(self, room: str, name: str) -> Path:
        folder = self.root / room
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


class PartialDownload:
    """An unfinished download; it survives its process.

    After a power cut a file may have its length without its bytes. So only bytes that were synced and then recorded
    in the sidecar count; the rest is downloaded again.
    """

    def __init__(self, cache: InputCache, path: Path) -> None:
        self._cache = cache
        self._path = path
        self._sidecar = path.with_name(path.name + ".json")
        self._stream: BinaryIO | None = None
        self._hasher = hashlib.sha256()
        self._unsynced_bytes = 0
        self.size_bytes = 0
        self.total_bytes: int | None = None  # of the whole file, as the first answer said
        self.validator = ""

    def open(self) -> None:
        """Continue the download of an earlier attempt or process."""
        progress = _read_record(self._sidecar, _Progress) or _Progress()
        _remove_unless_file(self._path)  # never write through a link
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        if os.fstat(descriptor).st_size < progress.synced_bytes:
            progress = _Progress()
        self._stream.truncate(progress.synced_bytes)
        while chunk := self._stream.read(HASH_CHUNK_BYTES):
            self._hasher.update(chunk)
        self.size_bytes, self.validator = progress.synced_bytes, progress.validator
        self.total_bytes = progress.total_bytes

    def restart(self, validator: str = "", total_bytes: int | None = None) -> None:
        """Drop all bytes. The next ones belong to `validator`."""
        stream = self._opened()
        stream.seek(0)
        stream.truncate(0)
        self._hasher = hashlib.sha256()
        self.size_bytes, self._unsynced_bytes = 0, 0
        self.validator, self.total_bytes = validator, total_bytes
        self._note()

    def write(self, chunk: bytes) -> None:
        stream = self._opened()
        view = memoryview(chunk)
        while view:
            view = view[stream.write(view) :]
        self._hasher.update(chunk)
        self.size_bytes += len(chunk)
        self._unsynced_bytes += len(chunk)
        if self._unsynced_bytes >= self._cache.sync_every_bytes:
            self.sync()

    def sync(self) -> None:
        if self._unsynced_bytes:
            os.fsync(self._opened().fileno())
            self._unsynced_bytes = 0
            self._note()
            failpoint("inputs.partial_synced")

    def digest(self) -> str:
        return "sha256:" + self._hasher.hexdigest()

    def commit(self) -> Path:
        """Make the bytes a blob: synced, renamed, read-only, the folder synced."""
        digest = self.digest()
        stream = self._opened()
        os.fsync(stream.fileno())
        failpoint("inputs.blob_synced")
        blob = self._cache.blob_path(digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        self._path.replace(blob)
        failpoint("inputs.blob_renamed")
        # Only now: a read-only partial file could not be continued after a crash.
        os.fchmod(stream.fileno(), 0o444)
        sync_path(blob.parent)
        self._sidecar.unlink(missing_ok=True)
        self.close()
        return blob

    def discard(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)
        self._sidecar.unlink(missing_ok=True)

    def close(self) -> None:
        """Keep the bytes for the next attempt."""
        self._unsynced_bytes = 0
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _note(self) -> None:
        progress = _Progress(
            synced_bytes=self.size_bytes, validator=self.validator, total_bytes=self.total_bytes
        )
        _write_record(self._sidecar, progress)

    def _opened(self) -> BinaryIO:
        assert self._stream is not None
        return self._stream


def _read_record(path: Path, kind: type[R]) -> R | None:
    """The record at `path`; None if it is missing or corrupt: then the bytes are downloaded again."""
    try:
        return msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=kind)
    except (OSError, ValueError, RecursionError):  # MsgspecError is a ValueError
        return None


def _write_record(path: Path, record: msgspec.Struct) -> None:
    replace_file(path, msgspec.json.encode(record), sync="none")


def _remove_unless_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
