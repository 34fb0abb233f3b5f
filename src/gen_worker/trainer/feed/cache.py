"""Decode-once cache: the dataset as an uncompressed, memory-mapped Arrow IPC file."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import remove_leftovers, replacing
from gen_worker.errors import InputError
from gen_worker.trainer.feed.groups import CHECKSUM_KEY, MANIFEST_KEY, GroupSource, IpcGroups
from gen_worker.trainer.feed.manifest import Manifest
from gen_worker.trainer.feed.readahead import JOIN_TIMEOUT_S, open_at_exit

logger = logging.getLogger(__name__)

FREE_SPACE_MARGIN = 1.1


class _StoppedError(Exception):
    pass


def write_groups(
    path: Path, manifest: Manifest, source: GroupSource, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Write every row group as one record batch, in order, with the manifest in the schema's metadata.

    Atomic and durable. Raises OSError of the disk.
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
    """An IPC file has one dictionary per column, which may only grow; parquet has one per row group."""
    carried: pa.Table | None = None
    for batch in batches:
        if not any(_has_dictionary(field.type) for field in batch.schema):
            yield batch
            continue
        table = pa.Table.from_batches([batch])
        if carried is not None:
            # The known dictionary comes first, so that its codes stay and new values are appended.
            table = pa.concat_tables([carried, table]).unify_dictionaries()
        unified = table.to_batches()[-1] if batch.num_rows else batch
        if batch.num_rows:
            carried = pa.Table.from_batches([unified.slice(0, 1)])
        elif carried is not None:  # an empty group has no dictionary of its own
            unified = carried.to_batches()[0].slice(0, 0)
        yield unified


def _has_dictionary(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        return True
    return any(_has_dictionary(data_type.field(i).type) for i in range(data_type.num_fields))


class CachedGroups:
    """Row groups from the cache file once it exists; until then from `source`.

    One background thread of one process writes the file, under a lock. The rename keeps it safe without the lock.
    If it cannot be written, a warning is logged and `source` is used.
    """

    def __init__(self, source: GroupSource, manifest: Manifest, folder: Path) -> None:
        self._source = source
        self._manifest = manifest
        self.checksums = source.checksums
        # Named by the stamps of the files, because other content may have the same manifest.
        self.path = folder / f"{manifest.stamp_digest}.arrow"
        self._cached: IpcGroups | None = None
        self._stop = threading.Event()
        self._is_settled = threading.Event()  # in use, or failed
        self._builder: threading.Thread | None = None
        self._pid = os.getpid()
        if self._open():
            return
        self._builder = threading.Thread(target=self._build, name="feed-cache", daemon=True)
        open_at_exit.add(self)
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
        """Stop a running build and delete its file."""
        self._stop.set()
        if self._builder is not None and self._pid == os.getpid():
            self._builder.join(JOIN_TIMEOUT_S)
        if self._cached is not None:
            self._cached.close()
        self._source.close()
        open_at_exit.discard(self)

    def _open(self, *, is_logged: bool = False) -> bool:
        if not self.path.exists():
            return False
        try:
            self._cached = IpcGroups(self.path, self._manifest, checksums=self.checksums)
        except InputError as error:
            if is_logged:
                logger.warning("the feed cache is not valid and is written again: %s", error)
            return False
        self._is_settled.set()
        return True

    def _build(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(self.path.with_suffix(".lock"), self._stop):
                if self._open(is_logged=True):  # written by another process
                    return
                self._remove_leftovers()
                self._check_space()
                write_groups(self.path, self._manifest, self._source, self._stop.is_set)
                self._open()
        except _StoppedError:
            pass
        except (OSError, InputError) as error:
            logger.warning(
                "the feed cache %s cannot be written, the feed continues without it: %s", self.path, error
            )
        finally:
            self._is_settled.set()

    def _remove_leftovers(self) -> None:
        """Of a builder that was killed. We hold the lock, so no other is running."""
        remove_leftovers(self.path.parent, self.path.name)

    def _check_space(self) -> None:
        needed = int(self._manifest.num_rows * self._manifest.bytes_per_row * FREE_SPACE_MARGIN)
        free = shutil.disk_usage(self.path.parent).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"it needs about {needed >> 20} MiB, but {free >> 20} MiB are free")


@contextlib.contextmanager
def _lock(path: Path, stop: threading.Event) -> Iterator[None]:
    """Held while building. Waits for another builder, to use its file."""
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
