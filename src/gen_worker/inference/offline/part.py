"""One part: the answers to one row group, in a file that is named by all that made it.

A part is written under a temporary name, synced and renamed, so a file with that name is whole; its pages have checksums,
which a later attempt verifies before it skips the row group. Runs in a model worker.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import replacing
from gen_worker.contract.files.hashes import hash_bytes, hash_file
from gen_worker.contract.job.run_ids import run_id_from
from gen_worker.inference.messages import GroupDone, GroupProgress, PredictGroup
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
from gen_worker.trainer.feed.manifest import chunk_span

READ_ROWS = 1 << 16
HASH_BYTES = 4 << 20
PROGRESS_EVERY_S = 1.0
MAX_STEM = 60
MADE_BY = b"trn.made_by"


def predict_group(
    order: PredictGroup, model: LoadedModel, tell: Callable[[GroupProgress], None]
) -> GroupDone:
    """Blocks. Whatever the author's code raises, with the rows in a note."""
    out = Path(order.out)
    with Path(order.path).open("rb") as file, pq.ParquetFile(file) as source:
        names = source.schema_arrow.names
        inputs = names if model.schema is None else model.schema.names
        wanted = list(dict.fromkeys([*inputs, *order.columns]))
        rows = source.metadata.row_group(order.group).num_rows
        content = _Content(file.fileno(), _spans(source.metadata, order.group, wanted))
        prefix = f"{run_id_from(Path(order.path).stem)[:MAX_STEM]}-{order.group:05d}-"
        if any(out.glob(f"{prefix}*.parquet")):  # by an earlier attempt, perhaps of other rows
            path = out / _name(prefix, order, content.digest())
            if is_whole(path, rows):
                return _done(order, path, rows, was_there=True)
        content.start()
        answers: list[Answer] = []
        kept: list[pa.RecordBatch] = []
        told_s = time.monotonic()
        num_done = 0
        for chunk in source.iter_batches(
            _chunk_rows(order.batch_rows), row_groups=[order.group], columns=wanted, use_threads=False
        ):
            if order.columns:
                kept.append(chunk.select(list(order.columns)))
            for answer in _predict_chunk(chunk.select(inputs), model, order, num_done):
                answers.append(answer)
                num_done += answer.num_rows
                if time.monotonic() - told_s > PROGRESS_EVERY_S:
                    tell(GroupProgress(batch=order.batch, rows=num_done))
                    told_s = time.monotonic()
        path = out / _name(prefix, order, content.digest())
        table = _join(answers)
    for index, name in enumerate(order.columns):
        table = table.append_column(name, pa.chunked_array([batch.column(index) for batch in kept]))
    _write(path, table, order)
    return _done(order, path, rows, was_there=False)


def is_whole(path: Path, rows: int) -> bool:
    """Whether a part of so many rows is there, and all of its pages match their checksums."""
    try:
        with path.open("rb") as file, pq.ParquetFile(file, page_checksum_verification=True) as part:
            if part.metadata.num_rows != rows:
                return False
            for group in range(part.num_row_groups):
                part.read_row_group(group, use_threads=False)
            return True
    except (OSError, pa.ArrowException):
        return False


def _predict_chunk(
    chunk: pa.RecordBatch, model: LoadedModel, order: PredictGroup, first_row: int
) -> Iterator[Answer]:
    """Batch after batch, always of `batch_rows` rows: as the server computes it."""
    size = order.batch_rows
    fitted = chunk if model.schema is None else fit_batch(chunk, model.schema)
    is_aligned = is_always_aligned(fitted.schema, size)
    if is_aligned:
        fitted = pad_batch(fitted, -(-fitted.num_rows // size) * size)
    predict = model.predictor.predict
    for start in range(0, chunk.num_rows, size):
        rows = min(size, chunk.num_rows - start)
        batch = fitted.slice(start, size) if is_aligned else pad_batch(fitted.slice(start, rows), size)
        try:
            answer = predict(batch)
        except Exception as fault:
            last = first_row + start + rows - 1
            fault.add_note(f"rows {first_row + start} to {last} of row group {order.group} of {order.path}")
            raise
        yield answer if rows == size else answer.slice(0, rows)


def _chunk_rows(batch_rows: int) -> int:
    """What is decoded at once: whole batches."""
    return max(READ_ROWS // batch_rows, 1) * batch_rows


def _join(answers: list[Answer]) -> pa.Table:
    if not answers:  # a row group without rows
        return pa.Table.from_batches([], schema=pa.schema([]))
    names = list(answers[0].columns)
    for answer in answers:
        if list(answer.columns) != names:
            raise RowsError(
                f"predict returned {', '.join(answer.columns)}, and {', '.join(names)} for other rows"
            )
    columns: dict[str, Values] = {}
    for name in names:
        pieces = [answer.columns[name] for answer in answers]
        if all(isinstance(piece, np.ndarray) for piece in pieces):
            columns[name] = np.concatenate(pieces)
        else:
            columns[name] = [value for piece in pieces for value in _values(piece)]
    joined = Answer(columns=columns, num_rows=sum(answer.num_rows for answer in answers))
    return pa.Table.from_batches([answer_batch(joined)])


def _values(piece: Values) -> list[Any]:
    return piece.tolist() if isinstance(piece, np.ndarray) else piece


def _write(path: Path, table: pa.Table, order: PredictGroup) -> None:
    table = table.replace_schema_metadata({MADE_BY: order.made_by.encode()})
    with replacing(path) as file:
        pq.write_table(table, file, write_page_checksum=True)
        failpoint("prediction.part_written")
    failpoint("prediction.part_renamed")


def _done(order: PredictGroup, path: Path, rows: int, *, was_there: bool) -> GroupDone:
    return GroupDone(
        batch=order.batch,
        name=path.name,
        rows=rows,
        size_bytes=path.stat().st_size,
        hash=hash_file(path),
        was_there=was_there,
    )


def _name(prefix: str, order: PredictGroup, content: str) -> str:
    made_by = hash_bytes(f"{order.made_by}\n{content}\n{order.group}".encode())
    return f"{prefix}{made_by.removeprefix('sha256:')[:16]}.parquet"


def _spans(footer: pq.FileMetaData, group: int, names: list[str]) -> list[tuple[int, int]]:
    """The bytes of the columns in the file."""
    chunks = footer.row_group(group)
    found = []
    for index in range(chunks.num_columns):
        column = chunks.column(index)
        if column.path_in_schema.partition(".")[0] in names:
            found.append(chunk_span(column))
    return sorted(found)


class _Content:
    """The digest of a row group's bytes, computed while the model works."""

    def __init__(self, fd: int, spans: list[tuple[int, int]]) -> None:
        self._fd = fd
        self._spans = spans
        self._digest = hashlib.sha256()
        self._thread: threading.Thread | None = None
        self._fault: OSError | None = None
        self._is_done = False

    def start(self) -> None:
        if not self._is_done:
            self._thread = threading.Thread(target=self._hash, name="input-hash")
            self._thread.start()

    def digest(self) -> str:
        """Blocks until it is known."""
        if self._thread is None and not self._is_done:
            self._hash()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            raise self._fault
        return self._digest.hexdigest()

    def _hash(self) -> None:
        try:
            for start, stop in self._spans:
                self._digest.update(f"{stop - start}:".encode())
                position = start
                while position < stop:
                    piece = os.pread(self._fd, min(HASH_BYTES, stop - position), position)
                    if not piece:
                        raise OSError(f"the file ended at byte {position}")
                    self._digest.update(piece)
                    position += len(piece)
        except OSError as fault:
            self._fault = fault
        self._is_done = True
