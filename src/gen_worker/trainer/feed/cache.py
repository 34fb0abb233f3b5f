"""Decode once: the dataset as an uncompressed Arrow IPC file that later passes and processes memory-map."""

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replacing
from gen_worker.errors import InputError
from gen_worker.trainer.feed.groups import CHECKSUM_KEY, MANIFEST_KEY, GroupSource, IpcGroups
from gen_worker.trainer.feed.manifest import Manifest

logger = logging.getLogger(__name__)

FREE_SPACE_MARGIN = 1.1
JOIN_TIMEOUT_S = 10.0


class _StoppedError(Exception):
    pass


def write_groups(
    path: Path, manifest: Manifest, source: GroupSource, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Every row group as one record batch, in order, with the manifest in the schema's metadata.

    Atomic and durable: a reader sees the whole file or none. Raises OSError if the disk refuses.
    """
    schema = manifest.schema.with_metadata({MANIFEST_KEY: manifest.to_json()})
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    try:
        with (
            replacing(path) as file,
            pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema, options=options) as writer,
        ):
            batches = _unify_dictionaries(_read_all(manifest, source, is_stopped))
            for group, batch in enumerate(batches):
                failpoint("feed_cache.write")
                known = source.checksums.known(group)
                writer.write_batch(batch, None if known is None else {CHECKSUM_KEY: str(known)})
    except pa.ArrowException as error:
        raise InputError(f"{path}: the dataset cannot be written as an Arrow IPC file: {error}") from error


def _read_all(
    manifest: Manifest, source: GroupSource, is_stopped: Callable[[], bool]
) -> Iterator[pa.RecordBatch]:
    for group in range(len(manifest.group_rows)):
        if is_stopped():
            raise _StoppedError
        yield source.read(group)


def _unify_dictionaries(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """An IPC file holds one dictionary per column, which may only grow; parquet has one per row group."""
    carried: pa.Table | None = None
    for batch in batches:
        if not any(_has_dictionary(field.type) for field in batch.schema):
            yield batch
            continue
        table = pa.Table.from_batches([batch])
        if carried is not None:
            # The dictionary so far comes first, so its codes stay and new values are appended.
            table = pa.concat_tables([carried, table]).unify_dictionaries()
        unified = table.to_batches()[-1] if batch.num_rows else batch
        if batch.num_rows:
            carried = pa.Table.from_batches([unified.slice(0, 1)])
        elif carried is not None:  # an empty group has no dictionary of its own to put in place of it
            unified = carried.to_batches()[0].slice(0, 0)
        yield unified


def _has_dictionary(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        return True
    return any(_has_dictionary(data_type.field(i).type) for i in range(data_type.num_fields))


class CachedGroups:
    """Row groups from the cache file as soon as there is one; from `source` until then.

    The file is made by one background thread of one process; a lock keeps others from doing the same work,
    and a rename makes it safe even where the lock does not hold. A cache that cannot be written is only
    slower: it is said in the log and the source goes on.
    """

    def __init__(self, source: GroupSource, manifest: Manifest, folder: Path) -> None:
        self._source = source
        self._manifest = manifest
        self.checksums = source.checksums
        # By the very files: another content may have the same manifest, and must not be served from here.
        self.path = folder / f"{manifest.stamp_digest}.arrow"
        self._cached: IpcGroups | None = None
        self._stop = threading.Event()
        self._is_settled = threading.Event()  # in use, or given up
        self._builder: threading.Thread | None = None
        self._pid = os.getpid()
        if self._open():
            return
        self._builder = threading.Thread(target=self._build, name="feed-cache", daemon=True)
        _open_caches.add(self)
        self._builder.start()

    def read(self, group: int) -> pa.RecordBatch:
        cached = self._cached
        return cached.read(group) if cached is not None else self._source.read(group)

    def check(self, group: int) -> None:
        self._source.check(group)

    def forget(self) -> None:
        self._source.forget()
        if self._cached is not None:
            self._cached.forget()

    def wait(self, timeout_s: float | None = None) -> bool:
        self._is_settled.wait(timeout_s)
        return self._cached is not None

    def close(self) -> None:
        """Stops a build under way and removes what it wrote so far."""
        self._stop.set()
        if self._builder is not None and self._pid == os.getpid():
            self._builder.join(JOIN_TIMEOUT_S)
        if self._cached is not None:
            self._cached.close()
        self._source.close()
        _open_caches.discard(self)

    def _open(self, *, is_told: bool = False) -> bool:
        if not self.path.exists():
            return False
        try:
            self._cached = IpcGroups(self.path, self._manifest, checksums=self.checksums)
        except InputError as error:
            if is_told:
                logger.warning("the feed cache is ignored and made anew: %s", error)
            return False
        self._is_settled.set()
        return True

    def _build(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(self.path.with_suffix(".lock"), self._stop):
                if self._open(is_told=True):  # made by another process meanwhile
                    return
                self._remove_leftovers()
                self._check_space()
                write_groups(self.path, self._manifest, self._source, self._stop.is_set)
                self._open()
        except _StoppedError:
            pass
        except (OSError, InputError) as error:
            logger.warning("the feed goes on without its cache %s: %s", self.path, error)
        finally:
            self._is_settled.set()

    def _remove_leftovers(self) -> None:
        """Parts left by a builder that was killed; the lock says that no other is at work."""
        for leftover in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            leftover.unlink(missing_ok=True)

    def _check_space(self) -> None:
        needed = int(self._manifest.num_rows * self._manifest.bytes_per_row * FREE_SPACE_MARGIN)
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"about {needed >> 20} MiB are needed, {free >> 20} MiB are free")


_open_caches: "weakref.WeakSet[CachedGroups]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that is inside Arrow while the interpreter is torn down can crash the process.
    for cache in list(_open_caches):
        cache.close()


@contextlib.contextmanager
def _lock(path: Path, stop: threading.Event) -> Iterator[None]:
    """Held while building. Waits for another builder, so that its file is picked up when it is there."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(0.2):
                    raise _StoppedError from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
