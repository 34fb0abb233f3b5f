"""Sources of row groups: parquet files, or a memory-mapped Arrow IPC file."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.errors import InputError
from gen_worker.trainer.compute.checksum import crc32
from gen_worker.trainer.feed.content import GroupChecksums
from gen_worker.trainer.feed.manifest import FileRecord, FileStamp, Manifest, Span, chunk_span, read_footer

MANIFEST_KEY = b"gen_worker.manifest"
MAX_IDLE_FILES = 8  # open parquet files kept between reads
FINGERPRINT_PAGES = 64
CHECKSUM_KEY = b"gen_worker.checksum"  # of a record batch: the checksum of its row group
CHECKSUM_BYTES = 1 << 20  # read at once: fits the cache of a core


class GroupSource(Protocol):
    """Row groups by their number in the manifest. `read` and `check` are thread-safe.

    Each row group is checksummed once; InputError if `checksums` has another value.
    """

    checksums: GroupChecksums

    def read(self, group: int) -> pa.RecordBatch: ...

    def check(self, group: int) -> None:
        """Compare a row group with its checksum, without decoding it."""

    def forget(self) -> None:
        """Drop all checksums."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _OpenFile:
    path: str
    source: pa.OSFile
    reader: pq.ParquetFile
    stamp: FileStamp | None = None  # None: not compared with the manifest yet

    def close(self) -> None:
        self.reader.close()
        self.source.close()


class ParquetGroups:
    """Decodes in the calling thread."""

    def __init__(self, manifest: Manifest) -> None:
        self._schema = manifest.schema
        self._places = [(file, index) for file in manifest.files for index in range(len(file.group_rows))]
        self._lock = threading.Lock()
        self._idle: list[_OpenFile] = []
        self._checked: dict[int, FileStamp | None] = {}  # row group -> stamp of its file at the check
        self.checksums = GroupChecksums(len(self._places), parquet_kind(self._schema.names))

    def read(self, group: int) -> pa.RecordBatch:
        record, index = self._places[group]
        with self._opened(group) as file:
            # Not the dataset scanner: it leaks its readahead (arrow#39808). No pre-buffering: it doubles the memory
            # and is not faster for files in the page cache.
            table = file.reader.read_row_group(index, columns=self._schema.names, use_threads=False)
            batch = _single_batch(table, self._schema)
        if batch.num_rows != record.group_rows[index]:
            raise InputError(
                f"{record.path}: row group {index} has {batch.num_rows} rows, expected {record.group_rows[index]}: the"
                " file changed while it was read"
            )
        return batch

    def check(self, group: int) -> None:
        self._checked.pop(group, None)
        with self._opened(group):
            pass

    def forget(self) -> None:
        self._checked.clear()
        self.checksums.forget()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for file in idle:
            file.close()

    @contextlib.contextmanager
    def _opened(self, group: int) -> Iterator[_OpenFile]:
        """The file of a row group, after its checksum was compared."""
        record, index = self._places[group]
        try:
            file = self._acquire(record)
            self._compare(group, file)
            yield file
            self._release(file)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{record.path}: row group {index} cannot be decoded: {error}") from error

    def _compare(self, group: int, file: _OpenFile) -> None:
        """Compare the checksum once, and again if the file was written since. Otherwise it costs one system call."""
        record, index = self._places[group]
        stamp = FileStamp.of(os.fstat(file.source.fileno()))
        if stamp != file.stamp:
            if stamp != record.stamp:
                _require_same_footer(record)
            file.stamp = stamp
        if group in self._checked and self._checked[group] == stamp:
            return
        columns = file.reader.metadata.row_group(index)
        checksum = _checksum_spans(file.source, _spans(columns, self._schema.names))
        self.checksums.note(group, checksum, f"{record.path}: row group {index}")
        self._checked[group] = stamp

    def _acquire(self, record: FileRecord) -> _OpenFile:
        with self._lock:
            for at, file in enumerate(self._idle):
                if file.path == record.path:
                    del self._idle[at]
                    return file
        size_bytes = Path(record.path).stat().st_size
        if size_bytes != record.size_bytes:
            raise InputError(
                f"{record.path}: changed since the feed was opened (was {record.size_bytes} bytes, is {size_bytes}):"
                " restore the file and resume"
            )
        source = pa.OSFile(record.path)
        return _OpenFile(record.path, source, pq.ParquetFile(source, pre_buffer=False))

    def _release(self, file: _OpenFile) -> None:
        evicted = None
        with self._lock:
            self._idle.append(file)
            if len(self._idle) > MAX_IDLE_FILES:
                evicted = self._idle.pop(0)
        if evicted is not None:
            evicted.close()


class IpcGroups:
    """The record batches of an Arrow IPC file as row groups: views of the mapped file."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest | None = None,
        columns: Sequence[str] | None = None,
        checksums: GroupChecksums | None = None,
    ) -> None:
        """With `manifest`, the file must have been written for it. InputError if the file is not valid.

        A file of `write_groups` has the checksums of its row groups.
        """
        self.path = path
        self._checked: set[int] = set()
        self._lock = threading.Lock()
        try:
            self._file = pa.memory_map(str(path))
        except OSError as error:
            raise InputError(f"{path}: cannot be opened: {error}") from error
        try:
            self._reader = pa.ipc.open_file(self._file)
            self.manifest = self._manifest_of_file()
            if manifest is not None and manifest.digest != self.manifest.digest:
                raise InputError(
                    f"{path}: was written for manifest {self.manifest.digest}, not {manifest.digest}"
                )
            found = [self._reader.get_batch(i).num_rows for i in range(self._reader.num_record_batches)]
            if tuple(found) != self.manifest.group_rows:
                raise InputError(f"{path}: its record batches do not match its manifest")
            self._is_of_parquet = MANIFEST_KEY in (self._reader.schema.metadata or {})
            names = self.manifest.schema.names if columns is None or self._is_of_parquet else columns
            kind = parquet_kind(names) if self._is_of_parquet else _kind("arrow", names)
            self.checksums = checksums or GroupChecksums(len(found), kind)
            if columns is not None:
                self.manifest = self.manifest.select(columns, str(path))
        except (OSError, ValueError, pa.ArrowException) as error:
            self._file.close()
            raise InputError(
                f"{path}: not a valid Arrow IPC file ({error}): write it with pyarrow.ipc.new_file"
            ) from error
        except InputError:
            self._file.close()
            raise
        self._schema = self.manifest.schema

    def read(self, group: int) -> pa.RecordBatch:
        try:
            with self._lock:  # the reader may not be thread-safe
                batch, metadata = self._reader.get_batch_with_custom_metadata(group)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{self.path}: record batch {group} cannot be read: {error}") from error
        names = self._schema.names
        columns = [batch.column(name) for name in names]
        if group not in self._checked:
            self._compare(group, columns, metadata)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def check(self, group: int) -> None:
        self._checked.discard(group)
        self.read(group)

    def forget(self) -> None:
        self._checked.clear()
        self.checksums.forget()

    def _compare(self, group: int, columns: list[pa.Array], metadata: pa.KeyValueMetadata | None) -> None:
        if not self._is_of_parquet:
            checksum = 0
            for column in columns:
                checksum = _checksum_array(column, checksum)
            self.checksums.note(group, checksum, f"{self.path}: record batch {group}")
        elif metadata is not None and CHECKSUM_KEY in metadata:
            self.checksums.note(group, int(metadata[CHECKSUM_KEY]), f"{self.path}: record batch {group}")
        self._checked.add(group)

    def close(self) -> None:
        with self._lock:
            self._file.close()  # batches keep the mapping alive

    def _manifest_of_file(self) -> Manifest:
        """The manifest of `write_groups`, else one made from the file itself."""
        schema = self._reader.schema
        document = (schema.metadata or {}).get(MANIFEST_KEY)
        if document is not None:
            return Manifest.from_json(document)
        batches = [self._reader.get_batch(i) for i in range(self._reader.num_record_batches)]
        rows = tuple(batch.num_rows for batch in batches)
        if not sum(rows):
            raise InputError(f"{self.path}: the file has no rows")
        record = FileRecord(
            path=str(self.path),
            size_bytes=self._file.size(),
            footer_digest=_fingerprint(self._file),
            group_rows=rows,
            stamp=FileStamp.of(self.path.stat()),
        )
        row_bytes = {
            name: max(sum(batch.column(i).nbytes for batch in batches) // sum(rows), 1)
            for i, name in enumerate(schema.names)
        }
        plain = pa.schema([field.remove_metadata() for field in schema])
        return Manifest.build([record], plain, row_bytes)


def _single_batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        chunked = table.column(field.name)
        chunks = chunked.chunks
        column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.nulls(0, field.type)])
        if column.type != field.type:
            raise ValueError(f"column {field.name!r} is {column.type}, expected {field.type}")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fingerprint(file: pa.MemoryMappedFile) -> str:
    """A hash of evenly spread pages, to detect other content cheaply."""
    size = file.size()
    digest = hashlib.blake2b(digest_size=16)
    for page in range(FINGERPRINT_PAGES + 1):
        digest.update(file.read_at(min(4096, size), max(size - 4096, 0) * page // FINGERPRINT_PAGES))
    return digest.hexdigest()


def parquet_kind(names: Sequence[str]) -> str:
    """The kind of checksums over these encoded columns of parquet files."""
    return _kind("parquet", names)


def _kind(what: str, names: Sequence[str]) -> str:
    columns = hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
    return f"crc32:{what}:{columns}"


def _require_same_footer(record: FileRecord) -> None:
    """For a file that was written after the manifest was made."""
    found = read_footer(record.path)
    if isinstance(found, str):
        raise InputError(found)
    if found.record.identity != record.identity:
        raise InputError(f"{record.path}: changed since the feed was opened: restore the file and resume")


def _spans(group: pq.RowGroupMetaData, names: Iterable[str]) -> list[Span]:
    """The byte ranges of these columns, in order; adjacent ones are joined."""
    wanted = frozenset(names)
    spans: list[Span] = []
    for number in range(group.num_columns):
        chunk = group.column(number)
        path = chunk.path_in_schema
        if path in wanted or any(path.startswith(f"{name}.") for name in wanted if "." in path):
            spans.append(chunk_span(chunk))
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _checksum_spans(file: pa.OSFile, spans: Iterable[Span]) -> int:
    checksum = 0
    for start, stop in spans:
        for at in range(start, stop, CHECKSUM_BYTES):
            checksum = crc32(file.read_at(min(CHECKSUM_BYTES, stop - at), at), checksum)
    return checksum


def _checksum_array(array: pa.Array, checksum: int) -> int:
    for buffer in array.buffers():
        if buffer is not None:
            checksum = crc32(buffer, checksum)
    if pa.types.is_dictionary(array.type):
        checksum = _checksum_array(array.dictionary, checksum)
    return checksum
