"""One digest of all files that a job names: equal digests mean equal training data. Needs no pyarrow.

- A shard has the hash of its folder's index, if the index is newer than the shard and the sizes are equal.
- All other files are hashed, if they have at most `WHOLE_BYTES` together.
- Otherwise a file is represented by size, modification time and the hash of its footer. Rewriting it changes these.

Remote files (s3:, https:…) are not read; only their names are in the digest. Paths in hyperparams are not read either:
the class may write to them.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gen_worker.errors import InputError, SpecError
from gen_worker.trainer.datasets.parquet_paths import expand_parquet_paths

WHOLE_BYTES = 256 << 20
TAIL_BYTES = 64 << 10
MAX_FOOTER_BYTES = 64 << 20
MAX_FILES = 100_000  # of one folder; those after them are compared by name
MAX_KNOWN = 20_000
MAX_PATH = 4096
SETTLE_NS = 2_000_000_000  # a file that changed more recently may change again within one clock tick
DATASETS = (("dataset",), ("validation", "dataset"), ("test", "dataset"), ("prediction",))
_OF_FILES = frozenset({"weights", "resume_checkpoint_path", "inputs", *(names[0] for names in DATASETS)})
INDEX_NAME, PARQUET_MAGIC = "index.json", b"PAR1"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):")  # at least two characters: `C:` is a drive

# path, device, inode, size, modification and change time
FileKey = tuple[str, int, int, int, int, int]


class JobContent(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is empty if the job names no data. `by_name`: what is compared by name only, for messages."""

    digest: str = ""
    by_name: tuple[str, ...] = ()


class _NamedFile(NamedTuple):
    """A file of a job. `hash` is that of an index; `status` is None if the file is missing."""

    field: str
    path: str
    status: os.stat_result | None
    hash: str = ""


def names_files(config: Mapping[str, Any]) -> bool:
    """May the job name files? Reads no disk."""
    if _OF_FILES.isdisjoint(config):
        return False
    return any(config.get(field) for field in ("weights", "resume_checkpoint_path", "inputs")) or any(
        section_of(config, names) is not None for names in DATASETS
    )


def find_changed_hyperparams(
    config: Mapping[str, Any], base_dir: str, since_ms: int, *, is_file_meant: bool = False
) -> list[str]:
    """Paths in the hyperparams of a job that changed since then: files and folders, or files only. Blocks."""
    changed = []
    for text in texts_in(config.get("hyperparams")):
        status = _stat(path) if (path := _absolute(text, base_dir)) else None
        if status is None or (is_file_meant and not stat.S_ISREG(status.st_mode)):
            continue
        if max(status.st_mtime_ns, status.st_ctime_ns) > since_ms * 1_000_000:
            changed.append(text)
    return changed


class ContentReader:
    """Reads the files of jobs, and caches the hashes of unchanged ones. Blocks; thread-safe."""

    def __init__(self, *, whole_bytes: int = WHOLE_BYTES) -> None:
        self._whole_bytes = whole_bytes
        self._known: dict[FileKey, str] = {}

    def read(self, config: Mapping[str, Any], base_dir: str) -> JobContent:
        """Never raises: a missing or unreadable file is part of the digest."""
        by_name: list[str] = []
        files = list(_named_files(config, base_dir, by_name))
        if not files and not by_name:
            return JobContent()
        unknown = [file for file in files if not file.hash and file.status is not None]
        is_whole = sum(file.status.st_size for file in unknown if file.status) <= self._whole_bytes
        base = f"{base_dir}/" if base_dir else ""
        facts = [
            (file.field, file.path.removeprefix(base), self._content(file, is_whole=is_whole))
            for file in files
        ]
        digest = hashlib.sha256(msgspec.json.encode([facts, by_name])).hexdigest()
        return JobContent(digest=f"sha256:{digest}", by_name=tuple(dict.fromkeys(by_name)))

    def hash_whole(self, path: str) -> str:
        """SHA-256 of a file, or a code why there is none."""
        try:
            status = os.stat(path)  # noqa: PTH116  (hot)
            key = (path, status.st_dev, status.st_ino, *_times(status))
            known = self._known.get(key)
            if known is not None:
                return known
            with open(path, "rb") as stream:  # noqa: PTH123
                found = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
                if _times(os.fstat(stream.fileno())) != _times(status):
                    return f"changing:{time.time_ns()}"  # equal to nothing
        except OSError as fault:
            return f"unreadable:{fault.errno}"
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLE_NS:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def _content(self, file: _NamedFile, *, is_whole: bool) -> Sequence[str | int]:
        if file.status is None:
            return ["missing"]
        if file.hash:
            return [file.status.st_size, file.hash]
        if is_whole:
            return [file.status.st_size, self.hash_whole(file.path)]
        return [file.status.st_size, file.status.st_mtime_ns, _hash_tail(file.path)]


def _times(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_tail(path: str) -> str:
    """Hash of a parquet file's footer (offsets, sizes, statistics), or of the last bytes of another file."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(size_bytes - 8, 0))
            tail, length = file.read(8), TAIL_BYTES
            if tail[4:] == PARQUET_MAGIC:
                length = min(int.from_bytes(tail[:4], "little") + 8, MAX_FOOTER_BYTES)
            file.seek(max(size_bytes - length, 0))
            return f"tail:{hashlib.sha256(file.read(length)).hexdigest()}"
    except OSError as fault:
        return f"unreadable:{fault.errno}"


def _named_files(config: Mapping[str, Any], base_dir: str, by_name: list[str]) -> Iterator[_NamedFile]:
    """All files that a job names, in a fixed order; others are added to `by_name`."""
    for names in DATASETS:
        dataset, field = section_of(config, names), ".".join(names)
        if dataset is None:
            continue
        for text in _list(dataset.get("parquet_paths")):
            if is_remote(text):
                by_name.append(_shown(text))
            elif path := _absolute(text, base_dir):
                yield from _parquet_files(field, path)
        if dataset.get("source"):
            by_name.append(f"{field}.source {dataset['source']}")
            for text in texts_in(dataset.get("args")):
                if path := _absolute(text, base_dir):
                    yield from _files_at(f"{field}.args", path, by_name)
    inputs = config.get("inputs")
    refs = inputs if isinstance(inputs, Mapping) else {}
    for field in ("base_model_ref", "dataset_parquet_refs", "resume_checkpoint_ref"):
        for text in _list(refs.get(field)):
            yield from _ref_files(f"inputs.{field}", text, base_dir, by_name)
    for field in ("weights", "resume_checkpoint_path"):
        for text in _list(config.get(field)):
            yield from _ref_files(field, text, base_dir, by_name)


def _parquet_files(field: str, text: str) -> Iterator[_NamedFile]:
    path = Path(text)
    folder = path.parent if path.name == INDEX_NAME else path
    try:
        if (folder / INDEX_NAME).is_file():
            yield from _indexed_files(field, folder)
            return
        files = expand_parquet_paths([text], [])
    except (OSError, ValueError):
        files = []
    if not files:
        yield _NamedFile(field, text, None)
    for name in files:
        yield _NamedFile(field, name, _stat(name))


def _indexed_files(field: str, folder: Path) -> Iterator[_NamedFile]:
    """The listed shards. One that is newer than the index is read: it was replaced."""
    from gen_worker.trainer.datasets.index import DatasetIndex

    place = str(folder / INDEX_NAME)
    index_status = _stat(place)
    try:
        index = DatasetIndex.read(folder)
    except (InputError, SpecError, OSError):
        yield _NamedFile(field, place, index_status)  # the worker will reject it
        return
    for shard in index.shards:
        path = f"{folder}/{shard.path}"
        status = _stat(path)
        is_known = (
            status is not None
            and index_status is not None
            and status.st_size == shard.size_bytes
            and max(status.st_mtime_ns, status.st_ctime_ns) <= index_status.st_ctime_ns
        )
        yield _NamedFile(field, path, status, shard.hash if is_known else "")


def _ref_files(field: str, text: str, base_dir: str, by_name: list[str]) -> Iterator[_NamedFile]:
    from gen_worker.trainer.resolve import RefKind, resolve

    try:
        ref = resolve(text, base_dir=Path(base_dir or "/"))
    except InputError:
        return  # the worker will reject it
    if not ref.is_local:
        if ref.digest is None:  # else its name identifies its content
            by_name.append(ref.display)
    elif field.endswith("parquet_refs") and ref.kind is not RefKind.FILE:
        yield from _parquet_files(field, ref.location)
    else:
        yield from _files_at(field, ref.location, by_name, is_file_meant=True)


def _files_at(
    field: str, path: str, by_name: list[str], *, is_file_meant: bool = False
) -> Iterator[_NamedFile]:
    """The file, or all files of the folder. Other text is not a path, unless `is_file_meant`.

    The marker of a checkpoint represents its files: it has their hashes, which are verified on loading.
    """
    status = _stat(path)
    if status is None or stat.S_ISREG(status.st_mode):
        if status is not None or is_file_meant:
            yield _NamedFile(field, path, status)
        return
    if not stat.S_ISDIR(status.st_mode):
        return
    num_files = 0
    for here, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in sorted(name for name in names if not name.startswith((".", "_"))):
            num_files += 1
            if num_files <= MAX_FILES:
                yield _NamedFile(field, f"{here}/{name}", _stat(f"{here}/{name}"))
            else:
                yield _NamedFile(field, f"{here}/{name}", None)
    if num_files > MAX_FILES:
        by_name.append(f"{path}: {num_files - MAX_FILES:,} of its {num_files:,} files")


def section_of(config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any] | None:
    """The object at that path of a job, if there is one."""
    place: Any = config
    for name in names:
        place = place.get(name) if _is_object(place) else None
    return place if _is_object(place) else None


def _is_object(value: object) -> bool:
    """Asked a dozen times for each submit, nearly always of a dict or of nothing."""
    return value is not None and (type(value) is dict or isinstance(value, Mapping))


def _list(value: Any) -> Iterator[str]:
    yield from (
        text for text in (value if isinstance(value, list) else [value]) if text and isinstance(text, str)
    )


def texts_in(value: Any) -> Iterator[str]:
    """Every text in plain data that could be a path or a name."""
    if isinstance(value, str):
        if 0 < len(value) <= MAX_PATH and value.isprintable():
            yield value
    elif isinstance(value, Mapping):
        for below in value.values():
            yield from texts_in(below)
    elif isinstance(value, list):
        for below in value:
            yield from texts_in(below)


def is_remote(text: str) -> bool:
    """Whether a path or ref names something of another machine."""
    found = _SCHEME.match(text)
    return found is not None and found[1].lower() != "file"


def _shown(text: str) -> str:
    from gen_worker.contract.redaction import strip_url_secrets

    return strip_url_secrets(text)


def _absolute(text: str, base_dir: str) -> str:
    """Empty if it is relative and there is no base folder."""
    if text.startswith("/"):
        return text
    return f"{base_dir}/{text}" if base_dir else ""


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116  (hot)
    except (OSError, ValueError):
        return None
