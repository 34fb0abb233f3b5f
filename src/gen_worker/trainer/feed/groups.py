"""Where row groups come from: parquet files, decoded; or an Arrow IPC file, memory-mapped."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.errors import InputError
from gen_worker.trainer.feed.manifest import FileRecord, Manifest

MANIFEST_KEY = b"gen_worker.manifest"
MAX_IDLE_FILES = 8  # open parquet files kept between reads
FINGERPRINT_PAGES = 64


class GroupSource(Protocol):
    """Row groups by their number in the manifest. `read` may be called from several threads."""

    def read(self, group: int) -> pa.RecordBatch: ...

    def close(self) -> None: ...


class ParquetGroups:
    """Decodes in the calling thread; the number of threads is the caller's choice."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._schema = manifest.schema
        self._places = [(file, index) for file in manifest.files for index in range(len(file.group_rows))]
        self._lock = threading.Lock()
        self._idle: list[tuple[str, pq.ParquetFile]] = []

    def read(self, group: int) -> pa.RecordBatch:
        record, index = self._places[group]
        try:
            file = self._acquire(record)
            # Not the dataset scanner: it keeps what it has read ahead (arrow#39808). No pre-buffering, as it
            # doubles the bytes held and gains nothing on files that the page cache serves.
            table = file.read_row_group(index, columns=self._schema.names, use_threads=False)
            self._release(record, file)
            batch = _single_batch(table, self._schema)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{record.path}: row group {index} cannot be decoded: {error}") from error
        if batch.num_rows != record.group_rows[index]:
            raise InputError(
                f"{record.path}: row group {index} has {batch.num_rows} rows, its footer promised "
                f"{record.group_rows[index]}: the file changed while it was being read"
            )
        return batch

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, file in idle:
            file.close()

    def _acquire(self, record: FileRecord) -> pq.ParquetFile:
        with self._lock:
            for at, (path, file) in enumerate(self._idle):
                if path == record.path:
                    del self._idle[at]
                    return file
        size_bytes = Path(record.path).stat().st_size
        if size_bytes != record.size_bytes:
            raise InputError(
                f"{record.path}: changed since the feed was opened (was {record.size_bytes} bytes, "
                f"is {size_bytes}): put the file back and resume"
            )
        return pq.ParquetFile(record.path, pre_buffer=False)

    def _release(self, record: FileRecord, file: pq.ParquetFile) -> None:
        evicted = None
        with self._lock:
            self._idle.append((record.path, file))
            if len(self._idle) > MAX_IDLE_FILES:
                _, evicted = self._idle.pop(0)
        if evicted is not None:
            evicted.close()


class IpcGroups:
    """The record batches of an Arrow IPC file as row groups: views of the mapped file, nothing is copied."""

    def __init__(
        self, path: Path, manifest: Manifest | None = None, columns: Sequence[str] | None = None
    ) -> None:
        """With `manifest`, the file must have been written for it. Raises InputError for an unsound file."""
        self.path = path
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
        except (OSError, ValueError, pa.ArrowException) as error:
            self._file.close()
            raise InputError(
                f"{path}: not a sound Arrow IPC file ({error}); write it with pyarrow.ipc.new_file"
            ) from error
        except InputError:
            self._file.close()
            raise
        if tuple(found) != self.manifest.group_rows:
            self._file.close()
            raise InputError(f"{path}: its record batches do not match the manifest written in it")
        if columns is not None:
            try:
                self.manifest = self.manifest.select(columns, str(path))
            except InputError:
                self._file.close()
                raise
        self._schema = self.manifest.schema

    def read(self, group: int) -> pa.RecordBatch:
        try:
            with self._lock:  # the reader is not promised to be thread-safe
                batch = self._reader.get_batch(group)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{self.path}: record batch {group} cannot be read: {error}") from error
        names = self._schema.names
        return pa.RecordBatch.from_arrays([batch.column(name) for name in names], schema=self._schema)

    def close(self) -> None:
        with self._lock:
            self._file.close()  # batches handed out keep the mapping alive

    def _manifest_of_file(self) -> Manifest:
        """The one that `write_groups` put there; else one made from the file itself."""
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
    """A hash of the footer's end and of evenly spread pages: a cheap way to notice another content."""
    size = file.size()
    digest = hashlib.blake2b(digest_size=16)
    for page in range(FINGERPRINT_PAGES + 1):
        digest.update(file.read_at(min(4096, size), max(size - 4096, 0) * page // FINGERPRINT_PAGES))
    return digest.hexdigest()
