"""`python -m gen_worker.tools.dataset index|verify DIR`: make or check the index of a dataset folder.

Stdout is JSON lines and nothing else: `dataset_progress` for each shard that is done, then one of `dataset_indexed`,
`dataset_verified`, `dataset_damaged` (with every fault) and `dataset_rejected` (there was nothing to work on).
"""

import argparse
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.errors import ExitCode, InputError, SpecError, WorkerError
from gen_worker.tools.program import print_record, run_tool
from gen_worker.trainer.datasets.index import INDEX_NAME, DatasetIndex, OnProgress, ShardRecord
from gen_worker.trainer.datasets.shard_hash import hash_shard, in_threads
from gen_worker.trainer.datasets.shard_loader import count_rows

MAX_WORKERS = 8  # beyond this a disk is slower for it


class ShardFault(msgspec.Struct, frozen=True, kw_only=True):
    """How a file differs from the index."""

    path: str
    problem: str  # missing, not-a-file, unreadable, size, rows, content
    message: str
    found: int | str | None = None
    expected: int | str | None = None


def verify_index(
    index: DatasetIndex, folder: Path, *, workers: int, on_progress: OnProgress
) -> list[ShardFault]:
    """Read and hash every shard; the faults in the order of the index. Blocks."""

    def verify(at: int, is_stopped: Callable[[], bool]) -> ShardFault | None:
        return _find_fault(index.shards[at], paths[at], is_stopped)

    paths = index.shard_paths(folder)
    faults: dict[int, ShardFault] = {}
    done_bytes = 0
    with closing(in_threads(verify, range(len(paths)), workers=workers)) as results:
        for at, fault in results:
            if fault is not None:
                faults[at] = fault
            done_bytes += index.shards[at].size_bytes
            on_progress(index.shards[at].path, done_bytes, index.size_bytes)
    return [faults[at] for at in sorted(faults)]


def find_unlisted(index: DatasetIndex, folder: Path) -> list[str]:
    """Parquet files of the folder that the index does not list: they are not read."""
    listed = {shard.path for shard in index.shards}
    found: list[str] = []
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [
            Path(here, name).relative_to(folder).as_posix()
            for name in files
            if name.endswith(".parquet") and not name.startswith((".", "_"))
        ]
    return sorted(set(found) - listed)


def _find_fault(shard: ShardRecord, path: Path, is_stopped: Callable[[], bool]) -> ShardFault | None:
    def fault(
        problem: str, message: str, found: int | str | None = None, expected: int | str | None = None
    ) -> ShardFault:
        return ShardFault(path=shard.path, problem=problem, message=message, found=found, expected=expected)

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return fault("not-a-file", "is not a file")
        if status.st_size != shard.size_bytes:
            how = f"has {status.st_size} bytes, expected {shard.size_bytes}{_rows_in_words(path, shard)}"
            return fault("size", how, status.st_size, shard.size_bytes)
        content, _ = hash_shard(path, is_stopped)
        if content != shard.hash:
            how = f"content changed: hash {content}, expected {shard.hash}{_rows_in_words(path, shard)}"
            return fault("content", how, content, shard.hash)
        rows = count_rows(path)
    except (FileNotFoundError, NotADirectoryError):
        return fault("missing", "is missing")
    except OSError as error:
        return fault("unreadable", f"cannot be read: {error.strerror or error}")
    except InputError as error:
        return fault("unreadable", str(error))
    if rows != shard.rows:
        return fault("rows", f"has {rows} rows, expected {shard.rows}", rows, shard.rows)
    return None


def _rows_in_words(path: Path, shard: ShardRecord) -> str:
    try:
        rows = count_rows(path)
    except (OSError, InputError):
        return "; it cannot be read as parquet"
    return f"; it has {rows} rows, expected {shard.rows}" if rows != shard.rows else ""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gen_worker.tools.dataset",
        description="Make or check the index of a folder of parquet files. Stdout is JSON lines.",
    )
    parser.add_argument("action", choices=["index", "verify"])
    parser.add_argument("folder", type=Path, metavar="DIR")
    default = min(MAX_WORKERS, max(2, os.cpu_count() or 1))
    parser.add_argument("--workers", type=int, default=default, help=f"threads that hash ({default})")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, 10 for an invalid document, 11 for missing or damaged data."""
    asked = build_parser().parse_args(arguments)
    folder: Path = asked.folder
    try:
        if not folder.is_dir():
            raise InputError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
        if asked.workers < 1:
            raise InputError(f"--workers {asked.workers}: expected at least 1")
        return int(
            _index(folder, asked.workers) if asked.action == "index" else _verify(folder, asked.workers)
        )
    except WorkerError as error:
        remedy = f"\nrestore it, or create it again: `trn dataset index {folder}`"
        is_broken_index = isinstance(error, SpecError) and asked.action == "verify"
        _tell("dataset_rejected", folder=str(folder), error=f"{error}{remedy if is_broken_index else ''}")
        return int(error.exit_code)


def _index(folder: Path, workers: int) -> ExitCode:
    index = DatasetIndex.build(folder, workers=workers, on_progress=_tell_progress)
    _tell("dataset_indexed", **_facts(index, folder))
    return ExitCode.COMPLETED


def _verify(folder: Path, workers: int) -> ExitCode:
    if not (folder / INDEX_NAME).exists():
        raise InputError(f"{folder} has no {INDEX_NAME}: create it with `trn dataset index {folder}`")
    index = DatasetIndex.read(folder)
    faults = verify_index(index, folder, workers=workers, on_progress=_tell_progress)
    facts = {**_facts(index, folder), "unlisted": find_unlisted(index, folder)}
    if faults:
        _tell("dataset_damaged", **facts, faults=faults)
        return ExitCode.INPUT
    _tell("dataset_verified", **facts)
    return ExitCode.COMPLETED


def _facts(index: DatasetIndex, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "index": str(folder / INDEX_NAME),
        "digest": index.digest,
        "rows": index.rows,
        "bytes": index.size_bytes,
        "num_shards": len(index.shards),
        "columns": index.read_schema(folder).columns,
    }


def _tell_progress(path: str, done_bytes: int, total_bytes: int) -> None:
    _tell("dataset_progress", path=path, done_bytes=done_bytes, total_bytes=total_bytes)


def _tell(event: str, **fields: Any) -> None:
    print_record({"event": event, **fields})


if __name__ == "__main__":
    run_tool(main)
