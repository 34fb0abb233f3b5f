"""A share of the requests as parquet, for people and for analysis: what was asked, what was answered, by which version.

Files are written whole; a crash loses what was not written yet. The oldest files are removed. For what must not be lost
there is `feedback`.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gen_worker.contract.files.durable import make_folder, replacing
from gen_worker.contract.job.model_version import VersionFacts
from gen_worker.inference.feedback.journal import list_numbers, numbered
from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.front import AnsweredRequest
from gen_worker.inference.messages import Part

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("gen_worker.inference")

FOLDER = "request_log"
PARQUET = ".parquet"
WRITE_EVERY_S = 30.0
MAX_WAITING_ROWS = 8192
MAX_WAITING_BYTES = 64 << 20
MAX_FILES = 128
MAX_BYTES = 1 << 30  # of all files
_HASH_RANGE = 1 << 32


class _Logged(NamedTuple):
    request_id: str
    answered_ms: int
    seconds: float
    shape: int
    facts: VersionFacts
    rows: Part
    payload: bytes
    answers: list[tuple[Part, bytes]]


class RequestLog:
    """`note` is the front's hook; a thread writes. pyarrow is imported there."""

    def __init__(self, folder: Path, share: float) -> None:
        self.folder = folder / FOLDER
        self._limit = int(share * _HASH_RANGE)
        self._waiting: list[_Logged] = []
        self._num_rows = self._num_bytes = 0
        self.num_dropped = 0  # requests that came faster than they could be written
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="request-log")
        self._wake = asyncio.Event()

    def note(self, request: AnsweredRequest) -> None:
        """Whether it is in the share depends on its id alone."""
        if not is_sampled(request.request_id, self._limit):
            return
        if self._num_rows >= 2 * MAX_WAITING_ROWS or self._num_bytes >= 2 * MAX_WAITING_BYTES:
            self.num_dropped += 1
            return
        part, payload = request.rows.encode()
        content = _join(payload)
        answers = [block.slice(start, stop) for block, start, stop in request.answer.pieces]
        self._waiting.append(
            _Logged(
                request.request_id,
                time.time_ns() // 1_000_000,
                request.seconds,
                request.answer.shape,
                request.facts,
                part,
                content,
                answers,
            )
        )
        self._num_rows += part.num_rows
        self._num_bytes += len(content) + sum(len(each[1]) for each in answers)
        if self._num_rows >= MAX_WAITING_ROWS or self._num_bytes >= MAX_WAITING_BYTES:
            self._wake.set()

    async def write_now_and_then(self) -> None:
        """Until it is cancelled."""
        while True:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WRITE_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits. What cannot be written is dropped, and logged."""
        waiting, self._waiting = self._waiting, []
        self._num_rows = self._num_bytes = 0
        if waiting:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._write, waiting)

    async def close(self) -> None:
        await self.flush()
        self._thread.shutdown()

    def _write(self, waiting: list[_Logged]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            make_folder(self.folder)
            for table in _tables(waiting):
                number = max(list_numbers(self.folder, PARQUET), default=0) + 1
                with replacing(numbered(self.folder, number, PARQUET), sync="file") as file:
                    pq.write_table(table, file)
            self._remove_old()
        except (OSError, ValueError, pa.ArrowException) as fault:
            self.num_dropped += len(waiting)
            logger.warning("%d requests are not in the request log: %s", len(waiting), fault)

    def _remove_old(self) -> None:
        paths = [numbered(self.folder, number, PARQUET) for number in list_numbers(self.folder, PARQUET)]
        sizes = [path.stat().st_size for path in paths]
        while len(paths) > 1 and (len(paths) > MAX_FILES or sum(sizes) > MAX_BYTES):
            paths.pop(0).unlink()
            sizes.pop(0)


def is_sampled(request_id: str, limit: int) -> bool:
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little") < limit


def _join(pieces: list[Buffer]) -> bytes:
    return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)


def _tables(waiting: list[_Logged]) -> "list[pa.Table]":
    """One for each schema, with a row for each row of a request."""
    import pyarrow as pa

    found: dict[pa.Schema, list[pa.RecordBatch]] = {}
    for logged in waiting:
        batch = _batch_of(logged)
        found.setdefault(batch.schema, []).append(batch)
    return [pa.Table.from_batches(batches, schema) for schema, batches in found.items()]


def _batch_of(logged: _Logged) -> "pa.RecordBatch":
    import pyarrow as pa

    from gen_worker.inference.model.columns import read_parts

    count, facts = logged.rows.num_rows, logged.facts
    rows = read_parts([logged.rows], memoryview(logged.payload), schema=None, shape=count)
    parts = [part for part, _ in logged.answers]
    answers = read_parts(
        parts, memoryview(b"".join(content for _, content in logged.answers)), schema=None, shape=count
    )
    same: Mapping[str, Any] = {
        "request_id": logged.request_id,
        "answered_ms": logged.answered_ms,
        "seconds": logged.seconds,
        "batch_shape": logged.shape,
        "run_id": facts.run_id,
        "step": facts.step,
        "weights_hash": facts.weights_hash,
        "code_hash": facts.code_hash,
    }
    arrays = [pa.array([value] * count) for value in same.values()]
    arrays.insert(1, pa.array(range(count), pa.int32()))
    names = ["request_id", "row", *list(same)[1:]]
    for prefix, batch in (("input", rows), ("answer", answers)):
        names += [f"{prefix}.{name}" for name in batch.schema.names]
        arrays += batch.columns
    return pa.RecordBatch.from_arrays(arrays, names=names)
