"""A content-addressed store of downloads that any number of workers share.

<root>/sha256/ab/<hex>         the bytes; read-only, in place by rename, never changed
<root>/index/<key>.json        where a ref pointed when last seen: validator -> digest
<root>/partial/<key>[.json]    a download under way, and how much of it is on disk for certain
<root>/locks/<key>             one flock per key: one worker downloads, the others wait
<root>/folders/<key>/...       files that belong together, under their own names (links)
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replace_file, sync_path, temporary_path
from gen_worker.contract.files.hashes import hash_file
from gen_worker.contract.sizes import show_bytes

HASH_CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.2
MIN_FREE_BYTES = 64 << 20
MAX_RECORD_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """What a ref led to: the validator the server gave, and the bytes it stood for."""

    validator: str
    digest: str
    size_bytes: int


def key_of(text: str) -> str:
    """A file name for a ref; refs may hold secrets, so names are hashes."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


class InputCache:
    """Safe for threads and processes; files are only ever added whole."""

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
        """The blob of `digest` if it is here and sound.

        A damaged one is left where it is: someone may be reading it, and the next commit replaces it.
        """
        if not _DIGEST.fullmatch(digest):
            return None
        path = self.blob_path(digest)
        try:
            status = path.lstat()  # a link or a FIFO is nothing that we put there
            if not stat.S_ISREG(status.st_mode) or size_bytes not in (None, status.st_size):
                return None
            is_sound = not rehash or hash_file(path) == digest
        except FileNotFoundError:
            return None
        return path if is_sound else None

    def require_room(self, more_bytes: int = 0) -> None:
        """OSError (ENOSPC) where the disk would have less than `MIN_FREE_BYTES` left: others live there, too."""
        self.root.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes - more_bytes < MIN_FREE_BYTES:
            needed = f"{show_bytes(more_bytes)} more" if more_bytes else "more"
            raise OSError(
                errno.ENOSPC,
                f"the download needs {needed}, {show_bytes(free_bytes)} are free, of which"
                f" {show_bytes(MIN_FREE_BYTES)} are left for others",
                str(self.root),
            )

    @contextlib.contextmanager
    def locked(self, key: str, *, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock of `key`. `on_wait` is called while another worker has it, and may raise to give up."""
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
        record = _read_json(self._in("index", f"{key}.json"))
        try:
            return IndexEntry(
                validator=str(record["validator"]),
                digest=str(record["digest"]),
                size_bytes=int(record["size_bytes"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def remember(self, key: str, entry: IndexEntry, *, display: str) -> None:
        record = {
            "version": 1,
            "ref": display,
            "validator": entry.validator,
            "digest": entry.digest,
            "size_bytes": entry.size_bytes,
        }
        _write_json(self._in("index", f"{key}.json"), record)

    def partial(self, key: str) -> "PartialDownload":
        """The unfinished download of `key`; hold its lock."""
        return PartialDownload(self, self._in("partial", key))

    def place(self, files: Mapping[str, str]) -> Path:
        """A folder that holds blobs under names: relative name -> digest. Equal content, equal folder."""
        listing = json.dumps(sorted(files.items()))
        folder = self.root / "folders" / key_of(listing)[:32]
        for name, digest in files.items():
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            target = os.path.relpath(self.blob_path(digest), link.parent)
            # A relative link, renamed into place: the cache may be moved, and two workers may do this at once.
            temporary = temporary_path(link)
            temporary.symlink_to(target)
            temporary.replace(link)
        return folder

    def _in(self, room: str, name: str) -> Path:
        folder = self.root / room
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


class PartialDownload:
    """Bytes on their way to the cache; survives the process that wrote them.

    After a power cut a file may have its length without its bytes. So only what was synced and then written
    down in the sidecar counts as there; the rest is fetched again.
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
        """Take up what an earlier attempt or process left."""
        record = _read_json(self._sidecar)
        try:
            synced_bytes, validator = max(0, int(record["synced_bytes"])), str(record["validator"])
            total_bytes = None if record.get("total_bytes") is None else int(record["total_bytes"])
        except (KeyError, TypeError, ValueError):
            synced_bytes, validator, total_bytes = 0, "", None
        _remove_unless_file(self._path)  # never write through a link
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)
        if os.fstat(descriptor).st_size < synced_bytes:
            synced_bytes, validator, total_bytes = 0, "", None
        self._stream.truncate(synced_bytes)
        while chunk := self._stream.read(HASH_CHUNK_BYTES):
            self._hasher.update(chunk)
        self.size_bytes, self.validator, self.total_bytes = synced_bytes, validator, total_bytes

    def restart(self, validator: str = "", total_bytes: int | None = None) -> None:
        """Forget all bytes; what comes next belongs to `validator`, of a file of that size."""
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
        # Only now: a read-only partial left by a crash could not be taken up again.
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
        """Leave the bytes for the next attempt."""
        self._unsynced_bytes = 0
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _note(self) -> None:
        record = {
            "synced_bytes": self.size_bytes,
            "validator": self.validator,
            "total_bytes": self.total_bytes,
        }
        _write_json(self._sidecar, record)

    def _opened(self) -> BinaryIO:
        assert self._stream is not None
        return self._stream


def _read_json(path: Path) -> dict[str, Any]:
    """The record at `path`; a missing or torn one reads as empty, for then the bytes are fetched again."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            record = json.loads(stream.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    replace_file(path, json.dumps(record).encode(), sync="none")


def _remove_unless_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
