"""Parquet in, `pyarrow.RecordBatch` out: one batch a step, in an order that is a function of (seed, epoch).

`ArrowFeed` joins the parts: the manifest (what there is), the order (what comes when), a source of row groups,
and readahead threads. It holds no position: the loop counts the batches it committed and asks for
`batches(epoch=, batch=)`.
"""

import contextlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa

from gen_worker.errors import InputError
from gen_worker.trainer.feed.cache import CachedGroups, write_groups
from gen_worker.trainer.feed.content import CONTENT, Note, cursor_error
from gen_worker.trainer.feed.content_check import ComparedContent, compare_content
from gen_worker.trainer.feed.groups import GroupSource, IpcGroups, ParquetGroups
from gen_worker.trainer.feed.manifest import Manifest, read_manifest
from gen_worker.trainer.feed.order import ORDER_VERSION, Cursor, DataOrder, cursor_differences
from gen_worker.trainer.feed.stream import BatchStream
from gen_worker.trainer.feed.tensors import batch_to_torch

__all__ = ["ArrowFeed", "batch_to_torch"]

DEFAULT_READAHEAD_BYTES = 256 << 20


class ArrowFeed:
    """Batches of a dataset for one rank. Safe to iterate several times, also at once; `close` ends them all."""

    def __init__(
        self,
        source: GroupSource,
        manifest: Manifest,
        *,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        readahead: int = 2,
        readahead_bytes: int = DEFAULT_READAHEAD_BYTES,
        lanes: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("readahead", readahead), ("world_size", world_size)):
            if value < 1:
                raise InputError(f"{name}={value}: must be at least 1")
        if not 0 <= rank < world_size:
            raise InputError(f"rank={rank}: must be from 0 to {world_size - 1} at world_size={world_size}")
        group_rows = [rows for rows in manifest.group_rows if rows]
        group_bytes = manifest.bytes_per_row * manifest.num_rows // max(len(group_rows), 1)
        self._order = DataOrder(
            manifest.group_rows,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            lanes=lanes,
            group_bytes=group_bytes,
        )
        if self._order.batches_per_epoch == 0:
            raise InputError(
                f"{manifest.num_rows} rows are less than one batch of {batch_size} with drop_last: lower batch_size,"
                " or set drop_last to false"
            )
        self._shares = self._order.shares(rank, world_size)
        self._source = source
        self._rank = rank
        self._world_size = world_size
        self._readahead = readahead
        self._readahead_bytes = readahead_bytes
        self._streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()
        self._iterators: weakref.WeakSet[Generator[pa.RecordBatch, None, None]] = weakref.WeakSet()
        self._is_closed = False
        self.notes: list[Note] = []  # of a resume: what is worth a word about the data
        self.manifest = manifest
        self.manifest_digest = manifest.digest
        self.schema = manifest.schema
        self.num_rows = manifest.num_rows
        self.batches_per_epoch = self._order.batches_per_epoch

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        readahead: int = 2,
        readahead_bytes: int = DEFAULT_READAHEAD_BYTES,
        lanes: int | None = None,
        cache_dir: Path | None = None,
    ) -> "ArrowFeed":
        """Files, folders (their *.parquet, recursively, sorted) and globs. Reads footers only.

        Raises one InputError with every fault of every file. With `cache_dir` a background thread decodes the
        dataset once into an Arrow IPC file there; from then on, and in later processes, it is memory-mapped.
        """
        manifest = read_manifest(paths, columns)
        source: GroupSource = ParquetGroups(manifest)
        feed = cls(
            source,
            manifest,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=seed,
            rank=rank,
            world_size=world_size,
            readahead=readahead,
            readahead_bytes=readahead_bytes,
            lanes=lanes,
        )
        if cache_dir is not None:
            feed._source = CachedGroups(source, manifest, Path(cache_dir))
        return feed

    @classmethod
    def open_ipc(
        cls,
        path: str | Path,
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        readahead: int = 2,
        readahead_bytes: int = DEFAULT_READAHEAD_BYTES,
        lanes: int | None = None,
    ) -> "ArrowFeed":
        """An Arrow IPC file, memory-mapped. One made by `write_ipc` has the order of its parquet files."""
        source = IpcGroups(Path(path), columns=columns)
        try:
            return cls(
                source,
                source.manifest,
                batch_size=batch_size,
                shuffle=shuffle,
                drop_last=drop_last,
                seed=seed,
                rank=rank,
                world_size=world_size,
                readahead=readahead,
                readahead_bytes=readahead_bytes,
                lanes=lanes,
            )
        except InputError:
            source.close()
            raise

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[pa.RecordBatch]:
        """Endless batches from `batch` of `epoch` on, through the following epochs.

        Threads start with the first `next`; closing the iterator stops them and frees what they read ahead.
        """
        if self._is_closed:
            raise RuntimeError("the feed is closed")
        if epoch < 0 or not 0 <= batch <= self.batches_per_epoch:
            raise InputError(
                f"epoch={epoch}, batch={batch}: an epoch has the batches 0 to {self.batches_per_epoch - 1}"
            )
        if batch == self.batches_per_epoch:
            epoch, batch = epoch + 1, 0
        iterator = self._generate(epoch, batch)
        self._iterators.add(iterator)
        return iterator

    def _generate(self, epoch: int, batch: int) -> Generator[pa.RecordBatch, None, None]:
        stream = BatchStream(
            self._source,
            self._order,
            schema=self.schema,
            shares=self._shares,
            tail_span=self._order.tail_span(self._rank, self._world_size),
            is_shared=self._world_size > 1,
            bytes_per_row=self.manifest.bytes_per_row,
            readahead=self._readahead,
            readahead_bytes=self._readahead_bytes,
        )
        self._streams.add(stream)
        with contextlib.closing(stream):
            yield from stream.batches(epoch, batch)

    def state(self, *, epoch: int, batch: int) -> dict[str, Any]:
        """The cursor of a loop that has committed `batch` batches of `epoch`, and checksums of what was read, as JSON."""
        state: dict[str, Any] = msgspec.to_builtins(self._cursor(epoch, batch))
        return {**state, CONTENT: self._source.checksums.state()}

    def position(
        self, state: Mapping[str, Any], *, manifest: Manifest | Mapping[str, Any] | bytes | str | None = None
    ) -> tuple[int, int]:
        """(epoch, batch) of a saved cursor, if it means the same here; else InputError says what changed.

        Give the saved `manifest` (as it is, as JSON text or as a JSON object) to have the changed files named. Row
        groups of files with new stamps are compared with what was read before; `notes` says which. Blocks.
        """
        state = dict(state)
        content = state.pop(CONTENT, None)
        version = state.get("version")
        if version != ORDER_VERSION:
            raise InputError(
                f"the data cursor has version {version!r}, this release reads {ORDER_VERSION}: "
                "resume with the release that wrote it"
            )
        try:
            saved = msgspec.convert(state, Cursor)
        except msgspec.ValidationError as error:
            raise InputError(f"the data cursor is not valid: {error}") from error
        changes = cursor_differences(saved, self._cursor(0, 0))
        if manifest is not None and not isinstance(manifest, Manifest):
            manifest = Manifest.from_json(manifest)
        if saved.manifest_digest != self.manifest_digest:
            changes += (manifest and self.manifest.changes_since(manifest)) or [
                f"the dataset was {saved.manifest_digest} ({saved.num_rows} rows), "
                f"is now {self.manifest_digest} ({self.num_rows} rows)"
            ]
        elif content is not None:
            compared = compare_content(
                self._source, self.manifest, content, manifest, rank=self._rank, world_size=self._world_size
            )
            changes += compared.changes
            self.notes = compared.notes
        if changes:
            raise cursor_error(changes)
        if saved.epoch < 0 or not 0 <= saved.batch <= self.batches_per_epoch:
            raise InputError(
                f"the data cursor is at batch {saved.batch} of epoch {saved.epoch}; "
                f"an epoch has {self.batches_per_epoch} batches"
            )
        if saved.batch == self.batches_per_epoch:
            return saved.epoch + 1, 0
        return saved.epoch, saved.batch

    def compare(self, manifest: Mapping[str, Any], content: Mapping[str, Any]) -> ComparedContent:
        """What differs from a dataset that was described before. Then the rows of now count. Blocks."""
        saved = Manifest.from_json(manifest)
        if saved.digest != self.manifest_digest:
            return ComparedContent(changes=self.manifest.changes_since(saved) or ["its columns changed"])
        compared = compare_content(self._source, self.manifest, content, saved)
        if compared.changes:
            self._source.forget()
        return compared

    def rows_before(self, *, epoch: int, batch: int) -> int:
        """Rows in all batches before that position, over all ranks."""
        order = self._order
        per_epoch = order.full_batches * order.batch_size + order.tail_rows
        return epoch * per_epoch + min(batch * order.batch_size, per_epoch)

    def write_ipc(self, path: str | Path) -> None:
        """Decode once into an Arrow IPC file, atomically. `open_ipc` gives the same digest and order."""
        write_groups(Path(path), self.manifest, self._source)

    def wait_cached(self, timeout_s: float | None = None) -> bool:
        """Wait until the decode-once cache is in use; False if it is not (yet), or none was asked for."""
        return isinstance(self._source, CachedGroups) and self._source.wait(timeout_s)

    def close(self) -> None:
        """End every iterator, stop all threads, close the files. Batches handed out stay valid."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        for iterator in list(self._iterators):
            with contextlib.suppress(ValueError):  # at work in another thread; its stream has been closed
                iterator.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cursor(self, epoch: int, batch: int) -> Cursor:
        order = self._order
        return Cursor(
            version=ORDER_VERSION,
            seed=order.seed,
            epoch=epoch,
            batch=batch,
            batch_size=order.batch_size,
            lanes=order.lanes,
            window=order.window,
            shuffle=order.shuffle,
            drop_last=order.drop_last,
            num_rows=self.num_rows,
            manifest_digest=self.manifest_digest,
        )
