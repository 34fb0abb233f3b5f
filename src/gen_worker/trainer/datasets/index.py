"""`index.json` of a dataset folder: its shards in order, with their hashes.

Only listed files of an indexed folder are read, and changes are detected. `index.json` is the commit marker: it is
written last, atomically.
"""

import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from gen_worker.contract.document_schema import convert_document
from gen_worker.contract.documents import read_document, render_path, render_value
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import sync_path, temporary_path
from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.contract.job.spec import Count, Record
from gen_worker.errors import InputError
from gen_worker.trainer.datasets.schema import (
    SCHEMA_NAME,
    DatasetSchema,
    Size,
    raise_input_faults,
    refuse_other_version,
)
from gen_worker.trainer.datasets.shard_hash import FileIdentity, hash_shard, in_threads

INDEX_NAME = "index.json"
INDEX_VERSION: Final = "dataset_index.v1"

# (completed shard, bytes done, bytes in total), called in the caller's thread; it may raise to stop.
OnProgress = Callable[[str, int, int], None]

Hash = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z", description="sha256: and 64 digits")]
ShardPath = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(?!\.{1,2}(?:/|\Z))[^/\x00]+(?:/(?!\.{1,2}(?:/|\Z))[^/\x00]+)*\Z",
        description="a path inside the folder: not absolute, without '.', '..' and empty parts",
    ),
]


class ShardRecord(Record, frozen=True, kw_only=True):
    """One file at the time of indexing."""

    path: ShardPath
    rows: Size
    size_bytes: Count = msgspec.field(name="bytes")
    hash: Hash


class DatasetIndex(Record, frozen=True, kw_only=True, dict=True):
    """The shards in reading order. Serialises to index.json."""

    schema_version: Literal["dataset_index.v1"]
    created_ms: Size
    schema_digest: Hash
    rows: Size
    size_bytes: Count = msgspec.field(name="bytes")
    shards: Annotated[list[ShardRecord], msgspec.Meta(min_length=1)]

    @classmethod
    def build(
        cls, folder: str | Path, *, workers: int = 2, on_progress: OnProgress | None = None
    ) -> "DatasetIndex":
        """Read the footers of all *.parquet below `folder`, hash the files, write schema.json, then index.json.

        Blocks; durable when it returns. Files and order are those of a feed over a plain folder. One InputError with
        all faults of all shards; then nothing is written.
        """
        from gen_worker.trainer.feed.manifest import read_manifest

        folder = Path(folder)
        known = _known_schema(folder)
        _refuse_foreign_index(folder)
        before, faults = _scan(folder)
        names = list(before)
        try:
            manifest = read_manifest([str(folder / name) for name in names]) if names else None
        except InputError as error:
            faults += error.faults
        if faults:
            raise_input_faults(str(folder), faults, "nothing was indexed: fix these files, or move them away")
        assert manifest is not None
        hashes = _hash_all(folder, before, workers, on_progress)
        schema = DatasetSchema.from_arrow(manifest.schema, hints=known)
        shards = [
            ShardRecord(path=name, rows=file.num_rows, size_bytes=before[name].size_bytes, hash=hashes[name])
            for name, file in zip(names, manifest.files, strict=True)
        ]
        index = cls(
            schema_version=INDEX_VERSION,
            created_ms=time.time_ns() // 1_000_000,
            schema_digest=schema.digest,
            rows=manifest.num_rows,
            size_bytes=sum(shard.size_bytes for shard in shards),
            shards=shards,
        )
        documents = {} if schema == known else {SCHEMA_NAME: schema.to_json()}
        try:
            _commit(folder, {**documents, INDEX_NAME: index.to_json()})
        except OSError as error:
            raise InputError(f"{folder}: the index cannot be written: {error.strerror or error}") from error
        return index

    @classmethod
    def read(cls, path: str | Path) -> "DatasetIndex":
        """From a folder or an index.json, without reading shards.

        SpecError with all faults of the document; InputError if it or its schema is missing.
        """
        path = Path(path)
        path = path / INDEX_NAME if path.is_dir() else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read: {error.strerror}. `DatasetIndex.build({str(path.parent)!r})` creates an index"
            ) from error
        index = _decode_own(content) or _decode_strictly(path)
        index.read_schema(path.parent)
        return index

    def read_schema(self, folder: str | Path) -> DatasetSchema:
        """The schema.json of `folder`; InputError if it is not that of this index."""
        schema = DatasetSchema.read(folder)
        if schema.digest != self.schema_digest:
            raise InputError(
                f"{Path(folder) / SCHEMA_NAME}: its columns are not those of {INDEX_NAME} (digest {schema.digest},"
                f" expected {self.schema_digest}): restore the file, or index again: `DatasetIndex.build({str(folder)!r})`"
            )
        return schema

    @cached_property
    def digest(self) -> str:
        """Of everything except the time: equal digests mean equal data."""
        shards = [(shard.path, shard.rows, shard.size_bytes, shard.hash) for shard in self.shards]
        facts = msgspec.json.encode([self.schema_version, self.schema_digest, shards])
        return hash_bytes(facts)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def shard_paths(self, folder: str | Path) -> list[Path]:
        """Absolute paths of the shards, in order. InputError with each that is a link out of the folder."""
        folder = Path(folder).absolute()
        paths = [folder / shard.path for shard in self.shards]
        stray = [f"{path}: a link out of the folder" for path in _leading_out(folder, paths)]
        if stray:
            raise_input_faults(str(folder), stray, "move the files into the folder and index it again")
        return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDataset:
    """Paths of a job, with indexed folders replaced by their shards."""

    parquet_paths: list[str]
    indexes: list[tuple[Path, DatasetIndex]]  # with their folders
    schemas: list[DatasetSchema]  # one for each index

    @property
    def schema(self) -> DatasetSchema | None:
        """The schema of all indexed folders; None if there is none, or they differ."""
        return self.schemas[0] if len({schema.digest for schema in self.schemas}) == 1 else None


def resolve_dataset_paths(paths: Sequence[str]) -> ResolvedDataset:
    """Replace a folder with an index.json, or that file, by its shards; other paths are kept."""
    resolved: list[str] = []
    indexes: list[tuple[Path, DatasetIndex]] = []
    for text in paths:
        path = Path(text)
        folder = path.parent if path.name == INDEX_NAME and path.is_file() else path
        if not (folder / INDEX_NAME).is_file():
            resolved.append(text)
            continue
        index = DatasetIndex.read(folder)
        indexes.append((folder.absolute(), index))
        resolved += [str(shard) for shard in index.shard_paths(folder)]
    schemas = [index.read_schema(folder) for folder, index in indexes]
    return ResolvedDataset(parquet_paths=resolved, indexes=indexes, schemas=schemas)


def _hash_all(
    folder: Path, before: dict[str, FileIdentity], workers: int, on_progress: OnProgress | None
) -> dict[str, str]:
    def hash_one(name: str, is_stopped: Callable[[], bool]) -> tuple[str, str]:
        """(hash, "") or ("", fault)"""
        path = folder / name
        try:
            found, identity = hash_shard(path, is_stopped)
        except InputError as error:
            return "", f"{path}: {error}"
        except OSError as error:
            return "", f"{path}: cannot be read: {error.strerror}"
        if identity.content != before[name].content:
            return "", f"{path}: changed while the folder was indexed"
        return found, ""

    hashes: dict[str, str] = {}
    faults: list[str] = []
    done_bytes, total_bytes = 0, sum(identity.size_bytes for identity in before.values())
    with closing(in_threads(hash_one, list(before), workers=workers)) as results:
        for name, (found, fault) in results:
            hashes[name] = found
            faults += [fault] if fault else []
            done_bytes += before[name].size_bytes
            if on_progress is not None:
                on_progress(name, done_bytes, total_bytes)
    if faults:
        raise_input_faults(
            str(folder), sorted(faults), "nothing was indexed: index the folder when it is complete"
        )
    return hashes


def _scan(folder: Path) -> tuple[dict[str, FileIdentity], list[str]]:
    """The shards by name, sorted, and faults. The rules are those of the feed."""
    found: dict[str, FileIdentity] = {}
    faults: list[str] = []
    links: list[Path] = []

    def note_unreadable(error: OSError) -> None:
        faults.append(f"{error.filename}: cannot be read: {error.strerror}")

    for here, folders, files in os.walk(folder, onerror=note_unreadable):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        # Links are not followed: inside the folder, their files are found under their own names.
        links += [path for name in folders if (path := Path(here, name)).is_symlink()]
        for name in files:
            if not name.endswith(".parquet") or name.startswith((".", "_")):
                continue
            path = Path(here, name)
            try:
                status = path.stat()
            except OSError as error:
                faults.append(f"{path}: cannot be read: {error.strerror}")
                continue
            if not stat.S_ISREG(status.st_mode):
                faults.append(f"{path}: not a file")
            elif not _is_text(relative := path.relative_to(folder).as_posix()):
                faults.append(f"{path!a}: the name is not UTF-8: rename it")
            else:
                found[relative] = FileIdentity.of(status)
    stray = _leading_out(folder, [*links, *(folder / name for name in found)])
    faults += [f"{path}: a link out of the folder" for path in stray]
    if not found and not faults:
        faults.append("the folder has no *.parquet file")
    return dict(sorted(found.items())), faults


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _leading_out(folder: Path, paths: Sequence[Path]) -> list[Path]:
    """The paths below `folder` that link out of it. One stat each: parents are resolved once."""
    root = os.path.realpath(folder)
    parents = {parent: os.path.realpath(parent) for parent in {path.parent for path in paths}}

    def is_inside(path: Path) -> bool:
        real = os.path.realpath(path) if path.is_symlink() else parents[path.parent]
        return os.path.commonpath([root, real]) == root

    return [path for path in paths if not is_inside(path)]


def _known_schema(folder: Path) -> DatasetSchema | None:
    """The existing schema.json, for its hints. SpecError if it cannot be read: it is not overwritten."""
    return DatasetSchema.read(folder) if (folder / SCHEMA_NAME).exists() else None


def _refuse_foreign_index(folder: Path) -> None:
    path = folder / INDEX_NAME
    try:
        data = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, str) or not version.startswith("dataset_index."):
        raise InputError(f"{path}: the file of another program would be overwritten: move it away")


def _decode_own(content: bytes) -> DatasetIndex | None:
    """Fast path: an index exactly as we write it has no faults. None for any other."""
    try:
        index = msgspec.json.decode(content, type=DatasetIndex)
    except (ValueError, RecursionError):  # MsgspecError is a ValueError
        return None
    is_sound = (
        len({shard.path for shard in index.shards}) == len(index.shards)
        and sum(shard.rows for shard in index.shards) == index.rows
        and sum(shard.size_bytes for shard in index.shards) == index.size_bytes
    )
    return index if is_sound and index.to_json() == content else None


def _decode_strictly(path: Path) -> DatasetIndex:
    data = read_document(path)
    refuse_other_version(data, INDEX_VERSION, source=str(path))
    return convert_document(data, DatasetIndex, source=str(path), more_faults=_sense_faults(data))


def _sense_faults(data: Any) -> list[str]:
    """Faults that the field types cannot express, in the valid parts of the document."""
    faults: list[str] = []
    listed = data.get("shards") if isinstance(data, dict) else None
    shards = (
        [shard if isinstance(shard, dict) else {} for shard in listed or ()]
        if isinstance(listed, list)
        else []
    )
    seen: set[object] = set()
    for at, shard in enumerate(shards):
        path = shard.get("path")
        if isinstance(path, str) and path in seen:
            faults.append(f"{render_path(('shards', at, 'path'))}: {render_value(path)} is listed twice")
        seen.add(path if isinstance(path, str) else None)
    for name in ("rows", "bytes"):
        parts: list[Any] = [shard.get(name) for shard in shards]
        total = data.get(name) if isinstance(data, dict) else None
        if type(total) is int and all(type(part) is int for part in parts) and sum(parts) != total:
            faults.append(f"{name}: found {total}, expected {sum(parts)}, the sum over the shards")
    return faults


def _commit(folder: Path, documents: dict[str, bytes]) -> None:
    """Write all documents durably, in order. A full disk fails before the first rename."""
    staged = {name: temporary_path(folder / name) for name in documents}
    try:
        for name, content in documents.items():
            staged[name].write_bytes(content)
            sync_path(staged[name])
        failpoint("dataset.staged")
        for name, temporary in staged.items():
            temporary.replace(folder / name)
            failpoint(f"dataset.{Path(name).stem}_renamed")
            sync_path(folder)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
