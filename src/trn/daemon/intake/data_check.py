"""The files that a job names, looked at before it is queued: do they exist, with the sizes that an index says?

Names, sizes and indexes only. Footers are read by the process that loads the code, hashes by the worker.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gen_worker.errors import Fault, InputError, SpecError
from gen_worker.trainer.datasets.index import INDEX_NAME, DatasetIndex, ShardRecord
from gen_worker.trainer.datasets.job_content import DATASETS, is_remote, section_of
from gen_worker.trainer.datasets.parquet_paths import expand_parquet_paths, reads_output, say_output_is_read

MAX_SHARDS = 20_000
MAX_SHOWN = 5  # faults of one folder


def find_data_faults(config: Mapping[str, Any], base_dir: str) -> Iterator[Fault]:
    """Every fault of the data, weights, checkpoint and output folder that a job names on this machine. Blocks."""
    yield from _output_faults(section_of(config, ("prediction",)) or {}, base_dir)
    for field in ("weights", "resume_checkpoint_path"):
        path = _local(config.get(field), base_dir)
        if path is not None and not _exists(path):
            yield Fault(f"there is no {path}", path=field, kind="file", found=str(path))
        elif (
            path is not None and field != "weights" and path.is_dir()
        ):  # a class may read a folder of weights
            message = f"{path} is a folder, expected the .meta.json of a checkpoint"
            yield Fault(message, path=field, kind="file", found=str(path))
    for names in DATASETS:
        dataset = section_of(config, names) or {}
        paths, columns = dataset.get("parquet_paths"), dataset.get("columns")
        wanted = [name for name in columns if isinstance(name, str)] if isinstance(columns, list) else []
        for number, text in enumerate(paths if isinstance(paths, list) else ()):
            if (path := _local(text, base_dir)) is not None:
                field = f"{'.'.join(names)}.parquet_paths[{number}]"
                for words in _path_faults(path, wanted):
                    yield Fault(words, path=field, kind="data", found=str(path))


def _output_faults(prediction: Mapping[str, Any], base_dir: str) -> Iterator[Fault]:
    out, paths = _local(prediction.get("out"), base_dir), prediction.get("parquet_paths")
    if out is None:
        return
    if _exists(out) and not out.is_dir():
        message = f"{out} is a file, expected a folder for the predictions"
        yield Fault(message, path="prediction.out", kind="file", found=str(out))
    for path in [_local(text, base_dir) for text in paths] if isinstance(paths, list) else []:
        if path is not None and reads_output(str(path), str(out)):
            message = say_output_is_read(str(path), str(out))
            yield Fault(message, path="prediction.out", kind="file", found=str(out))


def _local(text: object, base_dir: str) -> Path | None:
    """None: no path, one of another machine, or a relative one without a folder to start from."""
    if not isinstance(text, str) or not text or is_remote(text) or text.startswith("file:"):
        return None
    return Path(base_dir) / text if base_dir or text.startswith("/") else None


def _path_faults(path: Path, wanted: Sequence[str]) -> Iterator[str]:
    folder = path.parent if path.name == INDEX_NAME else path
    try:
        if (folder / INDEX_NAME).is_file():
            yield from _index_faults(folder, wanted)
            return
        if path.is_dir():
            os.scandir(path).close()  # it must be readable; a folder in it (lost+found, say) need not
        faults: list[str] = []
        expand_parquet_paths([str(path)], faults)
        yield from faults
    except (OSError, ValueError) as fault:
        yield f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}"


def _index_faults(folder: Path, wanted: Sequence[str]) -> Iterator[str]:
    remedy = f"`trn dataset verify {folder}` lists what changed, `trn dataset index {folder}` accepts it"
    try:
        index = DatasetIndex.read(folder)
        names = [column.name for column in index.read_schema(folder).columns]
    except (InputError, SpecError) as fault:
        first, *more = str(fault).splitlines()
        yield f"{' '.join([first, *(line.strip() for line in more)])}; {remedy}"
        return
    found = [words for shard in index.shards[:MAX_SHARDS] if (words := _shard_fault(folder, shard))]
    yield from (f"{words}; {remedy}" for words in found[:MAX_SHOWN])
    if len(found) > MAX_SHOWN:
        yield f"{len(found) - MAX_SHOWN} more shards of {folder} are missing or changed; {remedy}"
    for name in (name for name in wanted if name not in names):
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        yield f"{folder}: no column {name!r}: {hint}"


def _shard_fault(folder: Path, shard: ShardRecord) -> str:
    path = os.path.join(folder, shard.path)  # noqa: PTH118 - there may be thousands
    try:
        found = os.stat(path).st_size  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return f"{path}: found nothing, expected a file of {shard.size_bytes:,} bytes"
    except (OSError, ValueError) as fault:
        return f"{path}: cannot be read: {getattr(fault, 'strerror', None) or fault}"
    if found != shard.size_bytes:
        return f"{path}: found {found:,} bytes, expected {shard.size_bytes:,}"
    return "" if os.access(path, os.R_OK) else f"{path}: found a file without permission to read it"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
