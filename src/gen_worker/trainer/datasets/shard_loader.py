"""The shards of an indexed dataset, verified and read ahead."""

import contextlib
import stat
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gen_worker.errors import InputError
from gen_worker.trainer.datasets.index import DatasetIndex, OnProgress
from gen_worker.trainer.datasets.schema import check_schema, column_faults, raise_input_faults
from gen_worker.trainer.datasets.shard_hash import (
    FileIdentity,
    HashStoppedError,
    Stamp,
    Stamps,
    hash_shard,
    in_threads,
)
from gen_worker.trainer.feed.readahead import Readahead, ReadaheadClosedError

if TYPE_CHECKING:
    import pyarrow as pa

V = TypeVar("V")

DEFAULT_PREFETCH_BYTES = 256 << 20
VERIFY_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShard:
    """A verified shard."""

    index: int  # in the dataset's index
    path: Path
    rows: int
    size_bytes: int
    _read: "Callable[[], pa.Table]"

    def table(self) -> "pa.Table":
        """Decode it in this thread, at every call. InputError if the file changed."""
        return self._read()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify_all` checked. If it `is_complete`, there is no fault: it would have been raised."""

    num_shards: int
    rows: int
    size_bytes: int
    hashed_bytes: int  # the others were hashed before and are unchanged
    is_complete: bool
    faults: tuple[str, ...] = ()  # found before a stop


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    fault: str = ""
    hashed_bytes: int = 0
    is_stopped: bool = False
    identity: FileIdentity | None = None


class ShardLoader:
    """Verified shards in order. Several iterators may be used at once; `close` ends all threads.

    The size of a shard is always checked; rows and hash unless `verify` is off, or a stamp in `cache_dir` shows that
    this file was hashed before. A background thread reads up to `prefetch` shards and `prefetch_bytes` ahead.
    """

    def __init__(
        self,
        index: DatasetIndex,
        folder: str | Path,
        *,
        columns: Sequence[str] | None = None,
        prefetch: int = 2,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        verify: bool = True,
        cache_dir: str | Path | None = None,
    ) -> None:
        if prefetch < 1:
            raise InputError(f"prefetch={prefetch}: must be at least 1")
        self.index = index
        self.folder = Path(folder).absolute()
        self.schema = index.read_schema(self.folder)
        if columns is not None:
            faults = column_faults(columns, self.schema.names, str(self.folder))
            if faults:
                raise_input_faults("dataset", faults)
        self._columns = self.schema.names if columns is None else list(columns)
        self._paths = index.shard_paths(self.folder)
        self._prefetch = prefetch
        self._prefetch_bytes = prefetch_bytes
        self._is_verifying = verify
        self._stamps = Stamps(Path(cache_dir) if cache_dir is not None else None, self.folder)
        self._halt = threading.Event()
        self._lock = threading.Lock()
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        self._readaheads: weakref.WeakSet[Readahead[int, Any]] = weakref.WeakSet()

    def __iter__(self) -> Iterator[LoadedShard]:
        return self.shards()

    def shards(self, order: Sequence[int] | None = None) -> Iterator[LoadedShard]:
        """Each shard after verification; `order` lists indices of shards. InputError at the first fault."""

        def load(at: int, is_stopped: Callable[[], bool]) -> LoadedShard:
            identity = self._require(at, is_stopped)
            shard = self.index.shards[at]
            return LoadedShard(
                index=at,
                path=self._paths[at],
                rows=shard.rows,
                size_bytes=shard.size_bytes,
                _read=lambda: self._read(at, identity),
            )

        return self._iterate(load, lambda shard: shard.size_bytes, order)

    def tables(self, order: Sequence[int] | None = None) -> "Iterator[pa.Table]":
        """Each shard as one table, verified and decoded ahead, with the requested columns in order."""

        def load(at: int, is_stopped: Callable[[], bool]) -> "pa.Table":
            return self._read(at, self._require(at, is_stopped))

        return self._iterate(load, lambda table: int(table.nbytes), order)

    def verify_all(
        self, on_progress: OnProgress | None = None, stop: Callable[[], bool] | None = None
    ) -> VerifyReport:
        """Compare every shard with the index, also if `verify` is off. One InputError with all faults.

        Blocks; two threads hash. Both call `stop` often; once it is true, they end and the report is incomplete.
        """
        self._refuse_closed()

        def verify(at: int, is_halted: Callable[[], bool]) -> _Verdict:
            return self._verify(
                at, lambda: is_halted() or self._halt.is_set() or (stop is not None and stop())
            )

        shards = self.index.shards
        faults: dict[int, str] = {}
        num_shards = rows = done_bytes = hashed_bytes = 0
        places = range(len(shards))
        with contextlib.closing(in_threads(verify, places, workers=VERIFY_THREADS)) as verdicts:
            for at, verdict in verdicts:
                hashed_bytes += verdict.hashed_bytes
                if verdict.is_stopped:
                    continue
                if verdict.fault:
                    faults[at] = f"{shards[at].path}: {verdict.fault}"
                num_shards, rows = num_shards + 1, rows + shards[at].rows
                done_bytes += shards[at].size_bytes
                if on_progress is not None:
                    on_progress(shards[at].path, done_bytes, self.index.size_bytes)
        listed = [faults[at] for at in sorted(faults)]
        is_complete = num_shards == len(shards)
        if listed and is_complete:
            raise_input_faults(str(self.folder), listed, self._remedy)
        return VerifyReport(
            num_shards=num_shards,
            rows=rows,
            size_bytes=done_bytes,
            hashed_bytes=hashed_bytes,
            is_complete=is_complete,
            faults=tuple(listed),
        )

    def close(self) -> None:
        """End all iterators and threads. Waits for a running hash or decode. Safe to repeat."""
        with self._lock:
            self._halt.set()
            readaheads = list(self._readaheads)
        for readahead in readaheads:
            readahead.close()
        for iterator in list(self._iterators):
            with contextlib.suppress(ValueError):  # running in another thread; its readahead is closed
                iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _remedy(self) -> str:
        return (
            "restore these files. If the change is intended, index the folder again:"
            f" `DatasetIndex.build({str(self.folder)!r})`"
        )

    def _refuse_closed(self) -> None:
        if self._halt.is_set():
            raise RuntimeError("the shard loader is closed")

    def _iterate(
        self,
        load: Callable[[int, Callable[[], bool]], V],
        size_of: Callable[[V], int],
        order: Sequence[int] | None,
    ) -> Iterator[V]:
        self._refuse_closed()
        places = list(range(len(self._paths)) if order is None else order)
        unknown = [at for at in places if not 0 <= at < len(self._paths)]
        if unknown:
            raise InputError(
                f"order: found {unknown[0]}, expected 0 to {len(self._paths) - 1}, the shards of the index"
            )
        iterator = self._generate(load, size_of, places)
        self._iterators.add(iterator)
        return iterator

    def _generate(
        self, load: Callable[[int, Callable[[], bool]], V], size_of: Callable[[V], int], places: list[int]
    ) -> Generator[V, None, None]:
        if not places:
            return
        halt = threading.Event()
        with self._lock:  # a close in another thread sees these threads, or they do not start
            self._refuse_closed()
            readahead = Readahead(
                iter(places),
                lambda at: load(at, lambda: halt.is_set() or self._halt.is_set()),
                estimate=lambda at: self.index.shards[at].size_bytes,
                size_of=size_of,
                num_threads=1,
                max_items=self._prefetch,
                max_bytes=self._prefetch_bytes,
                name="shard-loader",
            )
            self._readaheads.add(readahead)
        try:
            for _ in places:
                try:
                    value = readahead.pop()
                except (ReadaheadClosedError, HashStoppedError):
                    raise RuntimeError("the shard loader was closed while a shard was awaited") from None
                yield value
                del value
        finally:
            halt.set()
            readahead.close()

    def _require(self, at: int, is_stopped: Callable[[], bool]) -> FileIdentity:
        verdict = self._verify(at, is_stopped, with_hash=self._is_verifying)
        if verdict.is_stopped:
            raise HashStoppedError
        if verdict.fault:
            raise InputError(f"{self._paths[at]}: {verdict.fault}\n{self._remedy}")
        assert verdict.identity is not None
        return verdict.identity

    def _verify(self, at: int, is_stopped: Callable[[], bool], *, with_hash: bool = True) -> _Verdict:
        shard, path = self.index.shards[at], self._paths[at]
        if is_stopped():
            return _Verdict(is_stopped=True)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return _Verdict(fault="not a file")
            if status.st_size != shard.size_bytes:
                return _Verdict(fault=f"has {status.st_size} bytes, expected {shard.size_bytes}")
            identity = FileIdentity.of(status)
            stamp = Stamp(path=shard.path, identity=identity, rows=shard.rows, hash=shard.hash)
            if not with_hash or self._stamps.holds(stamp):
                return _Verdict(identity=identity)
            rows = count_rows(path)
            if rows != shard.rows:
                return _Verdict(fault=f"has {rows} rows, expected {shard.rows}")
            found, hashed = hash_shard(path, is_stopped)
        except HashStoppedError:
            return _Verdict(is_stopped=True)
        except (FileNotFoundError, NotADirectoryError):
            return _Verdict(fault="missing")
        except OSError as error:
            return _Verdict(fault=f"cannot be read: {error.strerror or error}")
        except InputError as error:
            return _Verdict(fault=str(error))
        if found != shard.hash:
            fault = f"content changed: hash {found}, expected {shard.hash}"
            return _Verdict(fault=fault, hashed_bytes=hashed.size_bytes)
        self._stamps.add(Stamp(path=shard.path, identity=hashed, rows=rows, hash=found), path)
        return _Verdict(identity=hashed, hashed_bytes=hashed.size_bytes)

    def _read(self, at: int, identity: FileIdentity) -> "pa.Table":
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self._paths[at]
        try:
            # Not `read_table`: it turns folder names such as `split=train` into columns.
            with pq.ParquetFile(path, pre_buffer=False) as file:
                check_schema(self.schema, file.schema_arrow, str(path))
                table = file.read(columns=self._columns, use_threads=False)
            is_same = FileIdentity.of(path.stat()).content == identity.content
        except (OSError, ValueError, pa.ArrowException) as error:
            raise InputError(f"{path}: cannot be decoded: {error}\n{self._remedy}") from error
        if not is_same:
            raise InputError(f"{path}: changed while it was read\n{self._remedy}")
        return table


def count_rows(path: Path) -> int:
    """Rows of a parquet file, from its footer. InputError without its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (ValueError, pa.ArrowException) as error:
        raise InputError(f"cannot be read as parquet: {error}") from error
