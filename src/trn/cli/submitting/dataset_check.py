"""The data that a job names, looked at before it is submitted: is it there, whole as far as sizes tell, with its columns?

Cheap on purpose: names, sizes and the first bytes of footers. What was hashed is verified by the worker, or by
`trn dataset verify`.
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trn.cli.submitting.parquet_footer import DamagedFileError, read_columns

INDEX_NAME, SCHEMA_NAME = "index.json", "schema.json"
MAX_FOOTERS = 16  # of files without an index; the worker reads them all
MAX_SHARDS = 20_000
MAX_TOLD = 5  # faults of one folder
_REF = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")  # s3:…, https:…: fetched by the worker
WHERE = (("dataset",), ("validation", "dataset"), ("test", "dataset"))


class _Shard(msgspec.Struct):
    path: str
    bytes: int


class _Index(msgspec.Struct):
    shards: list[_Shard]


class _Column(msgspec.Struct):
    name: str


class _Schema(msgspec.Struct):
    columns: list[_Column]


def find_dataset_faults(config: Mapping[str, Any], base_dir: Path) -> Iterator[str]:
    """Every fault of the training, validation and test data of a job."""
    for names in WHERE:
        dataset: Any = config
        for name in names:
            dataset = dataset.get(name) if isinstance(dataset, Mapping) else None
        if not isinstance(dataset, Mapping) or not isinstance(dataset.get("parquet_paths"), list):
            continue  # none, or judged as a document
        columns = dataset.get("columns")
        wanted = [name for name in columns if isinstance(name, str)] if isinstance(columns, list) else []
        for number, text in enumerate(dataset["parquet_paths"]):
            if isinstance(text, str) and text and not _REF.match(text):
                field = f"{'.'.join(names)}.parquet_paths[{number}]"
                yield from (f"{field}: {fault}" for fault in _path_faults(base_dir / text, wanted))


def _path_faults(path: Path, wanted: Sequence[str]) -> Iterator[str]:
    folder = path.parent if path.name == INDEX_NAME else path
    try:
        if (folder / INDEX_NAME).is_file():
            yield from _index_faults(folder, wanted)
            return
        files = _find_files(path)
    except (OSError, ValueError) as fault:
        yield f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}"
        return
    if not files:
        if path.is_dir():
            yield f"{path} holds no *.parquet file"
        elif glob.has_magic(str(path)):
            yield f"no file matches {path}"
        else:
            yield f"there is no {path}{_near(path)}"
    for file in files[:MAX_FOOTERS]:
        yield from _file_faults(file, wanted)


def _find_files(path: Path) -> list[Path]:
    """As the worker finds them; no more than are looked at."""
    if path.is_file():
        return [path]
    found: list[Path] = []
    if path.is_dir():
        os.scandir(path).close()  # it must be readable; a folder in it (lost+found, say) need not
        for here, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
            found += [
                Path(here, name)
                for name in sorted(names)
                if name.endswith(".parquet")
                and not name.startswith((".", "_"))
                and Path(here, name).is_file()
            ]
            if len(found) >= MAX_FOOTERS:
                break
    elif glob.has_magic(str(path)):
        for match in glob.iglob(str(path), recursive=True):  # noqa: PTH207 - an absolute pattern
            found += [Path(match)] if Path(match).is_file() else []
            if len(found) >= MAX_FOOTERS:
                break
    return found


def _file_faults(path: Path, wanted: Sequence[str]) -> Iterator[str]:
    try:
        columns = read_columns(path)
    except OSError as fault:
        yield f"{path} cannot be read: {fault.strerror}"
    except DamagedFileError as fault:
        yield f"{path}: {fault}"
    else:
        yield from _column_faults(columns, wanted, path)


def _index_faults(folder: Path, wanted: Sequence[str]) -> Iterator[str]:
    remedy = (
        f"`trn dataset verify {folder}` tells what changed, `trn dataset index {folder}` takes it as it is"
    )
    try:
        index = msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=_Index)
        schema = msgspec.json.decode((folder / SCHEMA_NAME).read_bytes(), type=_Schema)
    except OSError as fault:
        yield f"{fault.filename} cannot be read: {fault.strerror}; {remedy}"
        return
    except msgspec.MsgspecError as fault:
        yield f"the index of {folder} cannot be read: {fault}; {remedy}"
        return
    found = [words for shard in index.shards[:MAX_SHARDS] if (words := _shard_fault(folder, shard))]
    yield from (f"{words}; {remedy}" for words in found[:MAX_TOLD])
    if len(found) > MAX_TOLD:
        yield f"{len(found) - MAX_TOLD} more shards of {folder} are missing or changed; {remedy}"
    yield from _column_faults([column.name for column in schema.columns], wanted, folder)


def _shard_fault(folder: Path, shard: _Shard) -> str:
    path = os.path.join(folder, shard.path)  # noqa: PTH118 - there may be thousands
    try:
        found = os.stat(path).st_size  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return f"{path}: found nothing, expected a file of {shard.bytes:,} bytes"
    except (OSError, ValueError) as fault:
        return f"{path}: cannot be read: {getattr(fault, 'strerror', None) or fault}"
    if found != shard.bytes:
        return f"{path}: found {found:,} bytes, expected {shard.bytes:,}"
    return "" if os.access(path, os.R_OK) else f"{path}: found a file that you may not read"


def _column_faults(columns: list[str] | None, wanted: Sequence[str], source: Path) -> Iterator[str]:
    for name in wanted:
        if columns is not None and name not in columns:
            near = _nearest(name, columns)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(columns) or 'none'}"
            yield f"{source}: no column {name!r}; {hint}"


def _near(path: Path) -> str:
    try:
        near = _nearest(path.name, os.listdir(path.parent))  # noqa: PTH208
    except OSError:
        return ""
    return f"; did you mean {path.with_name(near)}?" if near else ""


def _nearest(name: str, names: Sequence[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1)), "")
