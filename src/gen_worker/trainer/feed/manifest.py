"""The files, rows and columns of a dataset, from parquet footers alone. Finds all faults before step 1."""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.errors import InputError
from gen_worker.trainer.datasets.parquet_paths import expand_parquet_paths
from gen_worker.trainer.datasets.schema import column_faults, raise_input_faults

MANIFEST_VERSION = 1
PARQUET_MAGIC = b"PAR1"
FOOTER_THREADS = 8  # small reads, dominated by latency on network disks

Span = tuple[int, int]  # bytes [start, stop) of a file


class FileStamp(NamedTuple):
    """Changes when a file is written, replaced or copied."""

    mtime_ns: int
    ctime_ns: int  # changes even if a tool resets mtime
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStamp":
        return cls(status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file at the time of the manifest."""

    path: str
    size_bytes: int
    footer_digest: str  # the footer has offsets, sizes and statistics: it differs after most rewrites
    group_rows: tuple[int, ...]
    stamp: FileStamp | None = None  # None: of an older release

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def num_rows(self) -> int:
        return sum(self.group_rows)

    @property
    def identity(self) -> tuple[str, int, str, tuple[int, ...]]:
        """Must not change. Without folder and stamp: a dataset may be moved and copied."""
        return self.name, self.size_bytes, self.footer_digest, self.group_rows


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The files in order and the schema of the columns that are read. Serialises to JSON."""

    version: int
    files: tuple[FileRecord, ...]
    arrow_schema: str  # an Arrow IPC schema message, base64
    row_bytes: dict[str, int]  # estimate of a decoded row, by column

    @classmethod
    def build(cls, files: Sequence[FileRecord], schema: pa.Schema, row_bytes: dict[str, int]) -> "Manifest":
        message = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return cls(version=MANIFEST_VERSION, files=tuple(files), arrow_schema=message, row_bytes=row_bytes)

    @classmethod
    def from_json(cls, document: bytes | str | Mapping[str, Any]) -> "Manifest":
        """From JSON text or a parsed JSON object."""
        try:
            if isinstance(document, bytes | str):
                manifest = msgspec.json.decode(document, type=cls)
            else:
                manifest = msgspec.convert(document, cls)
        except msgspec.MsgspecError as error:
            raise InputError(f"the saved manifest of the dataset is not valid: {error}") from error
        if manifest.version != MANIFEST_VERSION:
            raise InputError(
                f"manifest version {manifest.version} is unknown, this release reads {MANIFEST_VERSION}"
            )
        return manifest

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    def to_builtins(self) -> dict[str, Any]:
        """As an object, to embed in a JSON document."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.arrow_schema)))

    @cached_property
    def digest(self) -> str:
        columns = [(field.name, str(field.type), field.nullable) for field in self.schema]
        facts = msgspec.json.encode([self.version, [file.identity for file in self.files], columns])
        return "blake2b:" + hashlib.blake2b(facts, digest_size=32).hexdigest()

    @cached_property
    def group_rows(self) -> tuple[int, ...]:
        return tuple(rows for file in self.files for rows in file.group_rows)

    @cached_property
    def num_rows(self) -> int:
        return sum(self.group_rows)

    @property
    def bytes_per_row(self) -> int:
        return max(sum(self.row_bytes.values()), 1)

    def select(self, columns: Sequence[str], source: str) -> "Manifest":
        """The manifest of the same files with these columns."""
        faults = column_faults(columns, self.schema.names, source)
        if faults:
            raise_input_faults("dataset", faults)
        schema = pa.schema([self.schema.field(name) for name in columns])
        return Manifest.build(self.files, schema, {name: self.row_bytes[name] for name in columns})

    @cached_property
    def stamp_digest(self) -> str:
        """Changes when a file is written, copied or replaced."""
        facts = msgspec.json.encode([self.digest, [file.stamp for file in self.files]])
        return hashlib.blake2b(facts, digest_size=32).hexdigest()

    def rewritten_since(self, saved: "Manifest | None") -> list[int]:
        """Numbers of the files with other stamps than in `saved`; all of them if it has none."""
        if saved is None or len(saved.files) != len(self.files):
            return list(range(len(self.files)))
        pairs = enumerate(zip(self.files, saved.files, strict=True))
        return [number for number, (is_, was) in pairs if was.stamp is None or is_.stamp != was.stamp]

    def changes_since(self, saved: "Manifest") -> list[str]:
        """Differences from `saved`, one line each, by file name."""
        lines = []
        then = {file.name: file for file in saved.files}
        now = {file.name: file for file in self.files}
        for name in [*then, *(name for name in now if name not in then)]:
            was, is_ = then.get(name), now.get(name)
            if was is None and is_ is not None:
                lines.append(f"{is_.path}: is new")
            elif is_ is None and was is not None:
                lines.append(f"{was.path}: is gone")
            elif was is not None and is_ is not None and was.identity != is_.identity:
                lines.append(
                    f"{is_.path}: changed (was {was.size_bytes} bytes, {was.num_rows} rows; "
                    f"is {is_.size_bytes} bytes, {is_.num_rows} rows)"
                )
        if not lines and [f.identity for f in saved.files] != [f.identity for f in self.files]:
            lines.append("the same files are in another order, or repeated")
        if not saved.schema.equals(self.schema):
            lines.append(f"the columns were {_describe(saved.schema)}, are now {_describe(self.schema)}")
        return lines


def read_manifest(paths: Sequence[str], columns: Sequence[str] | None = None) -> Manifest:
    """Read the footers of all files below `paths`; one InputError with all faults."""
    faults: list[str] = []
    files = expand_parquet_paths(paths, faults)
    with ThreadPoolExecutor(min(FOOTER_THREADS, max(len(files), 1))) as pool:
        outcomes = list(pool.map(read_footer, files))
    faults.extend(outcome for outcome in outcomes if isinstance(outcome, str))
    footers = [outcome for outcome in outcomes if isinstance(outcome, _Footer)]
    if not footers:
        raise_input_faults("dataset", faults or ["no files were given: set dataset.parquet_paths"])

    # The first file with all columns defines the types; the others are compared with it.
    names = list(columns) if columns is not None else list(footers[0].schema.names)
    reference: _Footer | None = None
    for footer in footers:
        source = footer.record.path
        found = column_faults(names, footer.schema.names, source)
        if columns is None:
            extra = [name for name in footer.schema.names if name not in names]
            found += [
                f"{source}: column {name!r} is not in {footers[0].record.path}: give all files the same columns, or"
                " list the columns to read in `dataset.columns`"
                for name in extra
            ]
        if not found and reference is None:
            reference = footer
        elif not found and reference is not None:
            found = _type_faults(footer, reference, names)
        faults.extend(found)
    if not faults and not any(footer.record.num_rows for footer in footers):
        faults.append(f"the dataset has no rows: {', '.join(footer.record.path for footer in footers)}")
    if faults:
        raise_input_faults("dataset", faults)
    assert reference is not None
    schema = pa.schema([reference.schema.field(name).remove_metadata() for name in names])
    sized = next(footer for footer in footers if footer.record.num_rows)
    row_bytes = {name: sized.row_bytes(name) for name in names}
    return Manifest.build([footer.record for footer in footers], schema, row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    record: FileRecord
    schema: pa.Schema
    metadata: pq.FileMetaData

    def row_bytes(self, name: str) -> int:
        """Decoded bytes of one row of a column, by its type or its encoded size."""
        group = self.metadata.row_group(next(i for i, rows in enumerate(self.record.group_rows) if rows))
        encoded = 0
        for index in range(group.num_columns):
            chunk = group.column(index)
            if chunk.path_in_schema == name or chunk.path_in_schema.startswith(name + "."):
                encoded += chunk.total_uncompressed_size
        return max(_fixed_bytes(self.schema.field(name).type), -(-encoded // int(group.num_rows)), 1)


def _fixed_bytes(data_type: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(data_type):
        return int(data_type.list_size) * _fixed_bytes(data_type.value_type)
    try:
        return -(-int(data_type.bit_width) // 8)
    except ValueError:  # a type of variable width
        return 0


def read_footer(path: str) -> _Footer | str:
    """The footer, or a fault."""
    try:
        with Path(path).open("rb") as file:
            stamp = FileStamp.of(os.fstat(file.fileno()))
            size_bytes = file.seek(0, 2)
            file.seek(max(size_bytes - 8, 0))
            tail = file.read(8)
            if size_bytes < 12 or tail[4:] != PARQUET_MAGIC:
                file.seek(0)
                cause = "truncated" if file.read(4) == PARQUET_MAGIC else "no parquet header"
                return f"{path}: not a complete parquet file ({size_bytes} bytes): {cause}"
            footer_bytes = int.from_bytes(tail[:4], "little")
            if footer_bytes > size_bytes - 12:
                return (
                    f"{path}: corrupt footer: its length is {footer_bytes}, the file has {size_bytes} bytes"
                )
            file.seek(size_bytes - 8 - footer_bytes)
            footer = file.read(footer_bytes)
        # The footer alone is a valid file, so its schema needs no second read.
        with pq.ParquetFile(pa.BufferReader(PARQUET_MAGIC + footer + tail)) as reader:
            metadata, schema = reader.metadata, reader.schema_arrow
        data_end = _data_end(metadata)
        if data_end > size_bytes - 8 - footer_bytes:
            return f"{path}: corrupt: its row groups end at byte {data_end}, the file has {size_bytes} bytes"
        record = FileRecord(
            path=path,
            size_bytes=size_bytes,
            footer_digest=hashlib.blake2b(footer, digest_size=16).hexdigest(),
            group_rows=tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)),
            stamp=stamp,
        )
    except (OSError, pa.ArrowException) as error:
        return f"{path}: cannot be read as parquet: {error}"
    return _Footer(record=record, schema=schema, metadata=metadata)


def _data_end(metadata: pq.FileMetaData) -> int:
    if not metadata.num_row_groups:
        return 0
    last = metadata.row_group(metadata.num_row_groups - 1)
    return max((chunk_span(last.column(number))[1] for number in range(last.num_columns)), default=0)


def chunk_span(chunk: pq.ColumnChunkMetaData) -> Span:
    start = (chunk.has_dictionary_page and chunk.dictionary_page_offset) or chunk.data_page_offset
    return start, start + chunk.total_compressed_size


def _type_faults(footer: _Footer, reference: _Footer, names: Sequence[str]) -> list[str]:
    faults = []
    for name in names:
        is_, was = footer.schema.field(name), reference.schema.field(name)
        if not is_.equals(was):
            faults.append(
                f"{footer.record.path}: column {name!r} is {_describe_field(is_)},"
                f" but {_describe_field(was)} in {reference.record.path}"
            )
    return faults


def _describe_field(field: pa.Field) -> str:
    return f"{field.type}" if field.nullable else f"{field.type} not null"


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {_describe_field(field)}" for field in schema)
