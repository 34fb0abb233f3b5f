"""One part: the answers to one row group, in a file that is named by all that made it.

A part is written under a temporary name, synced and renamed, so a file with that name is whole; its pages have checksums,
which a later attempt verifies before it skips the row group. Runs in a model worker, which computes while one thread
decodes the rows that follow and another writes the part of the row group before.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replacing
from gen_worker.contract.files.hashes import hash_bytes, hash_file
from gen_worker.contract.files.regular import open_regular
from gen_worker.contract.job.run_ids import run_id_from
from gen_worker.inference.messages import GroupComputed, GroupDone, GroupProgress, PredictGroup, Raised
from gen_worker.inference.model.columns import (
    Answer,
    RowsError,
    Values,
    answer_batch,
    fit_batch,
    is_always_aligned,
    pad_batch,
)
from gen_worker.inference.model.loading import LoadedModel
from gen_worker.inference.model.number_types import Array, is_list
from gen_worker.inference.model.predictor import OutputError
from gen_worker.trainer.feed.manifest import chunk_span
from gen_worker.trainer.feed.tensors import BlockTensors, newest_slice

READ_ROWS = 1 << 11  # that are decoded at once
HASH_BYTES = 4 << 20
PROGRESS_EVERY_S = 1.0
MAX_STEM = 60
MADE_BY = b"trn.made_by"

T = TypeVar("T")
Told = GroupProgress | GroupComputed | GroupDone | Raised


class PartMaker:
    """Of one model worker. `make` is called by its thread, row group after row group."""

    def __init__(
        self,
        model: LoadedModel,
        tell: Callable[[Told], None],
        raised: Callable[[int, Exception], Raised],
    ) -> None:
        self._model = model
        self._tell_server = tell
        self._raised = raised
        self._telling = threading.Lock()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="row-reader")
        self._writer: threading.Thread | None = None

    def make(self, order: PredictGroup) -> None:
        """Returns when the answers are computed. What becomes of the part is told by the thread that writes it."""
        with ExitStack() as stack:
            try:
                work = _RowGroup(order, self._model, stack)
                done = work.find_made()
                if done is not None:
                    self._tell(done)
                    return
                columns = work.compute(self._reader, self._tell)
            except (BrokenPipeError, ConnectionResetError):
                raise
            except Exception as fault:
                self._tell(self._raised(order.batch, fault))
                return
            if self._writer is not None:
                self._writer.join()  # at most one part waits in memory
            self._tell(GroupComputed(batch=order.batch))
            self._writer = threading.Thread(
                target=self._write, args=(work, columns, stack.pop_all()), name="part-writer"
            )
            self._writer.start()

    def _write(self, work: "_RowGroup", columns: "_Columns", opened: ExitStack) -> None:
        told: Told
        with opened:
            try:
                told = work.write(columns)
            except Exception as fault:
                told = self._raised(work.order.batch, fault)
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker's own thread sees it, too
            self._tell(told)

    def _tell(self, message: Told) -> None:
        with self._telling:
            self._tell_server(message)


class _RowGroup:
    """One row group and its part. `stack` keeps the file open."""

    def __init__(self, order: PredictGroup, model: LoadedModel, stack: ExitStack) -> None:
        self.order = order
        self._model = model
        self._file = stack.enter_context(os.fdopen(open_regular(order.path, follow=True), "rb"))
        self._source = source = stack.enter_context(pq.ParquetFile(self._file))
        names = source.schema_arrow.names
        self._inputs = names if model.schema is None else model.schema.names
        self._wanted = list(dict.fromkeys([*self._inputs, *order.columns]))
        self._rows = source.metadata.row_group(order.group).num_rows
        stem = run_id_from(Path(order.path).stem)[:MAX_STEM]
        self._prefix = f"{stem}-{order.group:05d}-"

    def find_made(self) -> GroupDone | None:
        """Its part, where an earlier attempt made it."""
        is_any_there = any(Path(self.order.out).glob(f"{self._prefix}*.parquet"))  # perhaps of other rows
        return self._done(was_there=True) if is_any_there and is_whole(self._path, self._rows) else None

    def compute(self, reader: Executor, tell: Callable[[GroupProgress], None]) -> "_Columns":
        """The answers, and what is copied of the input. Whatever the author's code raises, with the rows in a note."""
        order = self.order
        columns = _Columns(self._rows)
        told_s = time.monotonic()
        for copied, rows in _read_ahead(self._read_rows(), reader):
            if copied is not None:
                columns.copied.append(copied)
            for answer in _predict_rows(rows, self._model, order, columns.num_rows):
                columns.add(answer)
                if time.monotonic() - told_s > PROGRESS_EVERY_S:
                    tell(GroupProgress(batch=order.batch, rows=columns.num_rows))
                    told_s = time.monotonic()
        return columns

    def _read_rows(self) -> "Iterator[tuple[pa.RecordBatch | None, _InputRows]]":
        """What is copied, and what is predicted, some rows after the other."""
        order = self.order
        for chunk in self._source.iter_batches(
            _chunk_rows(order.batch_rows), row_groups=[order.group], columns=self._wanted, use_threads=False
        ):
            copied = chunk.select(list(order.columns)) if order.columns else None
            yield copied, _InputRows(chunk.select(self._inputs), self._model.schema, order.batch_rows)

    def write(self, columns: "_Columns") -> GroupDone:
        """Blocks until the part is durable."""
        order = self.order
        table = columns.table(order.columns).replace_schema_metadata({MADE_BY: order.made_by.encode()})
        with replacing(self._path) as file:
            # Random numbers do not repeat: a dictionary of them takes six times as long, and more room.
            repeated = [field.name for field in table.schema if not _is_float(field.type)]
            pq.write_table(table, file, write_page_checksum=True, use_dictionary=repeated or False)
            failpoint("prediction.part_written")
        failpoint("prediction.part_renamed")
        return self._done(was_there=False)

    @cached_property
    def _path(self) -> Path:
        """Reads and hashes the bytes of the row group."""
        order = self.order
        content = _hash_spans(self._file.fileno(), _spans(self._source.metadata, order.group, self._wanted))
        made_by = hash_bytes(f"{order.made_by}\n{content}\n{order.group}".encode())
        return Path(order.out) / f"{self._prefix}{made_by.removeprefix('sha256:')[:16]}.parquet"

    def _done(self, *, was_there: bool) -> GroupDone:
        return GroupDone(
            batch=self.order.batch,
            name=self._path.name,
            rows=self._rows,
            size_bytes=self._path.stat().st_size,
            hash=hash_file(self._path),
            was_there=was_there,
        )


def is_whole(path: Path, rows: int) -> bool:
    """Whether a part of so many rows is there, and all of its pages match their checksums."""
    try:
        with (
            os.fdopen(open_regular(path, follow=True), "rb") as file,
            pq.ParquetFile(file, page_checksum_verification=True) as part,
        ):
            if part.metadata.num_rows != rows:
                return False
            for group in range(part.num_row_groups):
                part.read_row_group(group, use_threads=False)
            return True
    except (OSError, pa.ArrowException):
        return False


def _read_ahead(items: Iterator[T], reader: Executor) -> Iterator[T]:
    """The same, each made by the reader while the one before it is used. At its end the reader has nothing of it left."""
    following = reader.submit(next, items, None)
    try:
        while (item := following.result()) is not None:
            following = reader.submit(next, items, None)
            yield item
    finally:
        wait([following])


class _InputRows:
    """Rows as `predict` gets them: with the model's columns, and in batches that are as the server makes them."""

    def __init__(self, chunk: pa.RecordBatch, schema: pa.Schema | None, batch_rows: int) -> None:
        self.num_rows = chunk.num_rows
        self._size = batch_rows
        self._rows = chunk if schema is None else fit_batch(chunk, schema)
        self._block: BlockTensors | None = None  # where a batch is a slice that is aligned as it is
        if is_always_aligned(self._rows.schema, batch_rows):
            self._rows = pad_batch(self._rows, -(-chunk.num_rows // batch_rows) * batch_rows)
            self._block = BlockTensors(self._rows)

    def batches(self) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """(first row, number of rows, batch): each batch is padded to the same number."""
        size, block = self._size, self._block
        for start in range(0, self.num_rows, size):
            count = min(size, self.num_rows - start)
            if block is None:
                yield start, count, pad_batch(self._rows.slice(start, count), size)
            else:
                batch = self._rows.slice(start, size)
                newest_slice.place = batch, block, start
                yield start, count, batch
        newest_slice.place = None


def _predict_rows(
    rows: _InputRows, model: LoadedModel, order: PredictGroup, first_row: int
) -> Iterator[Answer]:
    """Batch after batch, always of `batch_rows` rows: as the server computes it."""
    predict = model.predictor.predict
    for start, count, batch in rows.batches():
        try:
            answer = predict(batch)
        except Exception as fault:
            last = first_row + start + count - 1
            fault.add_note(f"rows {first_row + start} to {last} of row group {order.group} of {order.path}")
            raise
        yield answer if count == order.batch_rows else answer.slice(0, count)


def _chunk_rows(batch_rows: int) -> int:
    """What is decoded at once: whole batches."""
    return max(READ_ROWS // batch_rows, 1) * batch_rows


class _Columns:
    """The answers to a row group. They are copied: a class may answer with the same memory again and again."""

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        self.copied: list[pa.RecordBatch] = []
        self._capacity = capacity
        self._arrays: dict[str, Array] = {}
        self._lists: dict[str, list[Any]] = {}
        self._names: list[str] = []

    def add(self, answer: Answer) -> None:
        """RowsError where it has other columns than those before it."""
        start, stop = self.num_rows, self.num_rows + answer.num_rows
        if not start:
            self._names = list(answer.columns)
        elif list(answer.columns) != self._names:
            raise RowsError(
                f"predict returned {', '.join(answer.columns)}, and {', '.join(self._names)} for other rows"
            )
        for name, values in answer.columns.items():
            array = self._arrays.get(name)
            if isinstance(values, np.ndarray) and (array is not None or not start):
                if array is None:
                    array = self._arrays[name] = np.empty((self._capacity, *values.shape[1:]), values.dtype)
                elif values.shape[1:] != array.shape[1:]:
                    raise OutputError(
                        f"predict returned {name!r} with the shape {list(values.shape[1:])} a row, and"
                        f" {list(array.shape[1:])} for other rows"
                    )
                elif values.dtype != array.dtype:
                    array = self._arrays[name] = array.astype(np.result_type(array, values))
                array[start:stop] = values
            else:
                self._take_list(name, values)
        self.num_rows = stop

    def _take_list(self, name: str, values: Values) -> None:
        """Also of arrays, where other batches have lists."""
        known = self._lists.setdefault(name, [])
        before = self._arrays.pop(name, None)
        if before is not None:
            known += before[: self.num_rows].tolist()
        known += values.tolist() if isinstance(values, np.ndarray) else values

    def table(self, copied: tuple[str, ...]) -> pa.Table:
        """With the columns of the input that are copied."""
        columns = {name: self._arrays.get(name, self._lists.get(name, [])) for name in self._names}
        joined = answer_batch(Answer(columns=columns, num_rows=self.num_rows))
        table = pa.Table.from_batches([joined])
        for index, name in enumerate(copied):
            table = table.append_column(
                name, pa.chunked_array([batch.column(index) for batch in self.copied])
            )
        return table


def _is_float(data_type: pa.DataType) -> bool:
    while is_list(data_type):
        data_type = data_type.value_type
    return bool(pa.types.is_floating(data_type))


def _spans(footer: pq.FileMetaData, group: int, names: list[str]) -> list[tuple[int, int]]:
    """The bytes of the columns in the file."""
    chunks = footer.row_group(group)
    found = []
    for index in range(chunks.num_columns):
        column = chunks.column(index)
        if column.path_in_schema.partition(".")[0] in names:
            found.append(chunk_span(column))
    return sorted(found)


def _hash_spans(fd: int, spans: list[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, stop in spans:
        digest.update(f"{stop - start}:".encode())
        position = start
        while position < stop:
            piece = os.pread(fd, min(HASH_BYTES, stop - position), position)
            if not piece:
                raise OSError(f"the file ended at byte {position}")
            digest.update(piece)
            position += len(piece)
    return digest.hexdigest()
