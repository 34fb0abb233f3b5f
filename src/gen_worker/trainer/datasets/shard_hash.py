"""Hashes of shards, and stamps of the files that were verified before."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from gen_worker.contract.files.durable import sync_path
from gen_worker.errors import InputError
from gen_worker.trainer.transfer.input_cache import key_of

logger = logging.getLogger(__name__)

HASH_CHUNK_BYTES = 1 << 20  # fits the cache of a core
SETTLE_NS = 2_000_000_000  # resolution of the coarsest file system clock

T = TypeVar("T")
R = TypeVar("R")


class FileIdentity(NamedTuple):
    """Changes whenever the file changes."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int  # changes even if a tool resets mtime
    inode: int

    @property
    def content(self) -> tuple[int, int, int]:
        """Without ctime, which also changes with the mode or a hard link."""
        return self.size_bytes, self.mtime_ns, self.inode

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileIdentity":
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class HashStoppedError(Exception):
    """Hashing was stopped on request."""


def hash_shard(path: Path, is_stopped: Callable[[], bool]) -> tuple[str, FileIdentity]:
    """Hash and identity of a file; InputError (without its path) if it changed meanwhile. Releases the GIL."""
    with path.open("rb", buffering=0) as file:
        before = FileIdentity.of(os.fstat(file.fileno()))
        buffer = bytearray(min(HASH_CHUNK_BYTES, max(before.size_bytes, 1)))
        view = memoryview(buffer)
        hasher = hashlib.sha256()
        while count := file.readinto(buffer):
            hasher.update(view[:count])
            if is_stopped():
                raise HashStoppedError
        if FileIdentity.of(os.fstat(file.fileno())).content != before.content:
            raise InputError("changed while it was hashed: wait until it is complete")
    return "sha256:" + hasher.hexdigest(), before


def in_threads(
    work: Callable[[T, Callable[[], bool]], R], items: Sequence[T], *, workers: int
) -> Generator[tuple[T, R], None, None]:
    """Run `work(item, is_stopped)` in threads; yields results as they complete. Closing it stops the threads."""
    halt = threading.Event()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="shards")
    try:
        futures = {pool.submit(work, item, halt.is_set): item for item in items}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        halt.set()
        pool.shutdown(wait=True, cancel_futures=True)


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was hashed and whose rows were counted."""

    path: str
    identity: FileIdentity
    rows: int
    hash: str


class Stamps:
    """Verified files of one folder: one line each in a file of `cache_dir`; the last line of a path counts.

    The file is only appended to, so that workers may share it. Incomplete lines are ignored: the shard is hashed again.
    Thread-safe. Without `cache_dir` stamps are kept in memory.
    """

    def __init__(self, cache_dir: Path | None, folder: Path) -> None:
        self._path = cache_dir and cache_dir / f"stamps-v1-{key_of(os.path.realpath(folder))[:32]}.jsonl"
        self._lock = threading.Lock()
        self._stamps: dict[str, Stamp] = {}
        try:
            lines = self._path.read_bytes().splitlines() if self._path else []
        except OSError:
            lines = []
        decoder = msgspec.json.Decoder(Stamp)
        for line in lines:
            try:
                stamp = decoder.decode(line)
            except ValueError:  # MsgspecError is one; so is the fault of torn UTF-8
                continue
            self._stamps[stamp.path] = stamp

    def holds(self, stamp: Stamp) -> bool:
        return self._stamps.get(stamp.path) == stamp

    def add(self, stamp: Stamp, file: Path) -> None:
        """Store that `file` is valid, unless it was written so recently that its times may not show a change."""
        if time.time_ns() - stamp.identity.mtime_ns < SETTLE_NS or not _sync(file):
            return
        with self._lock:
            self._stamps[stamp.path] = stamp
            if self._path is None:
                return
            try:
                self._append(self._path, msgspec.json.encode(stamp))
            except OSError as error:
                logger.warning("%s: cannot be written, so shards are hashed each time: %s", self._path, error)
                self._path = None

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            os.write(descriptor, b"\n" + line)  # one write; the line feed ends an incomplete line of a crash
        finally:
            os.close(descriptor)


def _sync(path: Path) -> bool:
    """What was hashed in memory must be on disk before it is trusted: a power cut keeps a file's times, not its data."""
    try:
        sync_path(path)
    except OSError:
        return False
    return True
