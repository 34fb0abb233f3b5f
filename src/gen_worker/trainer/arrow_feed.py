"""Parquet in, `pyarrow.RecordBatch` out: one batch a step, in an order that is a function of (seed, epoch).

`ArrowFeed` joins manifest, order, row groups and readahead threads. It has no position: the loop counts the committed
batches and calls `batches(epoch=, batch=)`.
"""

import contextlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Required, Self, TypedDict, Unpack

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


class FeedOptions(TypedDict, total=False):
    """How `ArrowFeed` makes batches of the rows."""

    batch_size: Required[int]
    shuffle: bool
    drop_last: bool
    seed: int
    rank: int
    world_size: int
    readahead: int
    readahead_bytes: int
    lanes: int | None


class ArrowFeed:
    """Batches of a dataset for one rank. May be iterated several times, also in parallel."""

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
        self.notes: list[Note] = []  # about the data of a resume, to be logged
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
        columns: Sequence[str] | None = None,
        cache_dir: Path | None = None,
        **options: Unpack[FeedOptions],
    ) -> "ArrowFeed":
        """Files, folders (their *.parquet, recursively, sorted) and globs. Reads footers only.

        InputError lists every fault of every file. With `cache_dir` a background thread decodes the dataset once into
        an Arrow IPC file, which is memory-mapped from then on.
        """
        manifest = read_manifest(paths, columns)
        source: GroupSource = ParquetGroups(manifest)
        feed = cls(source, manifest, **options)
        if cache_dir is not None:
            feed._source = CachedGroups(source, manifest, Path(cache_dir))
        return feed

    @classmethod
    def open_ipc(
        cls,
        path: str | Path,
        *,
        columns: Sequence[str] | None = None,
        **options: Unpack[FeedOptions],
    ) -> "ArrowFeed":
        """An Arrow IPC file, memory-mapped; one of `write_ipc` keeps the order of its parquet files."""
        source = IpcGroups(Path(path), columns=columns)
        try:
            return cls(source, source.manifest, **options)
        except InputError:
            source.close()
            raise

    def batches(self, *, epoch: int = 0, batch: int = 0) -> Iterator[pa.RecordBatch]:
        """Endless batches from `batch` of `epoch` on. Threads start with the first `next`, and stop on close."""
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
        """The cursor after `batch` batches of `epoch`, with checksums of what was read, as JSON."""
        state: dict[str, Any] = msgspec.to_builtins(self._cursor(epoch, batch))
        return {**state, CONTENT: self._source.checksums.state()}

    def position(
        self, state: Mapping[str, Any], *, manifest: Manifest | Mapping[str, Any] | bytes | str | None = None
    ) -> tuple[int, int]:
        """(epoch, batch) of a saved cursor; InputError where the data or its order changed. Blocks.

        With the saved `manifest` (also as JSON) the error names the changed files. Row groups of files with a new
        modification time are compared with what was read before; `notes` names them.
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
        """What differs from a dataset that was described before. Blocks."""
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
        """Decode into an Arrow IPC file, atomically. `open_ipc` gives the same digest and order."""
        write_groups(Path(path), self.manifest, self._source)

    def wait_cached(self, timeout_s: float | None = None) -> bool:
        """Wait until the decode-once cache is in use; False if it is not."""
        return isinstance(self._source, CachedGroups) and self._source.wait(timeout_s)

    def close(self) -> None:
        """End all iterators, stop all threads, close the files. Returned batches stay valid."""
        self._is_closed = True
        for stream in list(self._streams):
            stream.close()
        for iterator in list(self._iterators):
            with contextlib.suppress(ValueError):  # running in another thread; its stream is closed
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
