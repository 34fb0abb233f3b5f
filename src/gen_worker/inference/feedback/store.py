"""Rows of feedback on disk: accepted once, then in one parquet file. Imports pyarrow. One thread uses it.

```text
N.log      accepted rows, synced before they are answered; the one with the highest number is written to
N.parquet  the same rows in the training schema; from then on N.log is not read
N.keys     which rows they are; then N.log is removed
```

Invariants
- A row that was answered `accepted` is in exactly one log, and so in exactly one parquet file: that of the same number.
- N.parquet is made of the whole frames of N.log and of nothing else, after the last one was added. If it is there, it is
  whole, and is not written again.
- A key is known as long as its request is: a repeat is answered as such, or as unknown. Where the disk damaged N.keys, the
  requests that were answered before count as unknown.
- What cannot be read is set aside, as N.log.damaged and so on, never deleted; what is whole in it still counts.
"""

import hashlib
import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import (
    make_folder,
    remove_leftovers,
    replace_file,
    replacing,
    sync_path,
)
from gen_worker.contract.files.regular import NotRegularFileError, open_regular, read_regular
from gen_worker.inference.feedback.journal import JournalFile, list_numbers, numbered, set_aside

logger = logging.getLogger("gen_worker.inference")

PARQUET, KEYS, SCHEMA = ".parquet", ".keys", "schema.arrow"
KEY_BYTES = 16
MAX_LOG_ROWS = 1 << 16
MAX_LOG_BYTES = 64 << 20
_LENGTH_BYTES = 4


class AcceptedHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a frame; a record batch follows."""

    keys: bytes  # KEY_BYTES for each row
    received_ms: int
    newest_request: int  # the last file of answered requests that one of the rows is in
    errors: list[float] = []  # by the metric of the job, of each row
    weights_hashes: list[str] = []  # of the versions that answered


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of N.keys."""

    num_rows: int
    oldest_ms: int
    newest_request: int
    keys: bytes
    check: int | None = None  # CRC of the keys
    lost_ms: int = 0  # when it was found that the keys cannot be read; 0: they can

    @property
    def is_whole(self) -> bool:
        return self.lost_ms > 0 or (
            len(self.keys) == KEY_BYTES * self.num_rows
            and (self.check is None or self.check == zlib.crc32(self.keys))
        )


class _LogState:
    """What is known of the rows of one number."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.oldest_ms = 0
        self.newest_request = 0
        self.keys: list[bytes] = []

    def add(self, head: AcceptedHead) -> None:
        self.num_rows += len(head.keys) // KEY_BYTES
        self.oldest_ms = min(self.oldest_ms or head.received_ms, head.received_ms)
        self.newest_request = max(self.newest_request, head.newest_request)
        self.keys.append(head.keys)

    def record(self) -> PartRecord:
        keys = b"".join(self.keys)
        return PartRecord(
            num_rows=self.num_rows,
            oldest_ms=self.oldest_ms,
            newest_request=self.newest_request,
            keys=keys,
            check=zlib.crc32(keys),
        )


def row_key(request_id: str, row: int) -> bytes:
    text = f"{row}/{request_id}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=KEY_BYTES).digest()


class FeedbackStore:
    def __init__(self, folder: Path) -> None:
        """Finishes what a crash interrupted."""
        self.folder = folder
        make_folder(folder)
        self.parts: dict[int, PartRecord] = {}
        self.lost_ms = (
            0  # of requests that were answered up to then, it is not known which rows were accepted
        )
        self.errors: deque[tuple[float, str]] = deque(maxlen=MAX_LOG_ROWS)  # of rows in the open log
        self._keys: dict[bytes, int] = {}  # -> number
        self._state = _LogState()
        remove_leftovers(folder)
        for number in list_numbers(folder, KEYS):
            self._know(number, self._read_keys(number))
            _unlink_log(numbered(folder, number))
        logs = list_numbers(folder)
        newest = max([*logs, *self.parts, *list_numbers(folder, PARQUET)], default=0)
        for number in logs:
            is_written = _is_there(numbered(folder, number, PARQUET))
            if number != newest or is_written:
                self._finish(number)
        if newest == 0 or not numbered(folder, newest).exists():
            newest += 1
        self.number = newest
        self._log = self._open_log(newest)

    @property
    def schema(self) -> pa.Schema | None:
        """Of the newest rows; None before the first, and where it cannot be read."""
        try:
            return pa.ipc.read_schema(pa.py_buffer(read_regular(self.folder / SCHEMA)))
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException) as fault:
            logger.warning("%s cannot be read: %s", self.folder / SCHEMA, fault)
            return None

    @property
    def num_open_rows(self) -> int:
        return self._state.num_rows

    @property
    def open_since_ms(self) -> int:
        """When the oldest row of the open log came; 0 where it has none."""
        return self._state.oldest_ms

    @property
    def is_full(self) -> bool:
        return self._state.num_rows >= MAX_LOG_ROWS or self._log.size >= MAX_LOG_BYTES

    def is_known(self, key: bytes) -> bool:
        return key in self._keys

    def accept(self, batch: pa.RecordBatch, head: AcceptedHead) -> None:
        """They are durable when it returns. OSError, and none of them is accepted, where the disk refuses."""
        if self._state.num_rows and not self._schema.equals(batch.schema, check_metadata=True):
            self.seal()  # rows of one file have one schema
        if not self._state.num_rows:
            self._begin(batch.schema)
        encoded = _encode(head)
        content = batch.serialize()
        size = self._log.size
        try:
            self._log.append([len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded, memoryview(content)])
            failpoint("feedback.written")
            self._log.sync()
        except OSError:
            self._log.cut_to(size)
            raise
        failpoint("feedback.synced")
        self._note(head)

    def seal(self) -> int | None:
        """The accepted rows as a parquet file: its number. None where there are none."""
        if not self._state.num_rows:
            return None
        number = self.number
        self._write_part(number, self._log)
        self._write_keys(number, self._state.record())
        self._log.close()
        numbered(self.folder, number).unlink()
        failpoint("feedback.log_removed")
        self.number = number + 1
        self._log = self._open_log(self.number)
        return number

    def part_path(self, number: int) -> Path:
        return numbered(self.folder, number, PARQUET)

    def newest_rows(self, num_rows: int) -> pa.Table | None:
        """At most so many, the newest ones of those that have the newest schema; oldest first."""
        found: list[pa.Table] = []
        count = 0
        schema = self.schema
        for table in self._newest_tables():
            if schema is None or not table.schema.equals(schema) or count >= num_rows:
                break
            found.append(table)
            count += table.num_rows
        if not count:
            return None
        joined = pa.concat_tables(reversed(found))
        return joined.slice(max(joined.num_rows - num_rows, 0))

    def forget_keys(self, oldest_request: int, last_part: int) -> None:
        """Of rows whose requests are unknown by now, up to that part."""
        for number in [number for number in self.parts if number <= last_part]:
            if self.parts[number].newest_request < oldest_request:
                del self.parts[number]
                self._keys = {key: place for key, place in self._keys.items() if place != number}
                numbered(self.folder, number, KEYS).unlink(missing_ok=True)

    def close(self) -> None:
        self._log.close()

    # One log.

    def _open_log(self, number: int) -> JournalFile:
        log = _open_whole(numbered(self.folder, number))
        sync_path(self.folder)
        self._state = _LogState()
        self.errors.clear()
        frames = log.frames()
        first = next(frames, None)
        if first is not None:
            self._schema = pa.ipc.read_schema(pa.py_buffer(first[1]))
            for _, body in frames:
                self._note(_read_head(body)[0])
        return log

    def _begin(self, schema: pa.Schema) -> None:
        """The first frame of a log is its schema."""
        message = schema.serialize()
        if self._log.size:
            self._log.cut_to(0)
        if schema != self.schema:
            replace_file(self.folder / SCHEMA, bytes(message))
        self._log.append([memoryview(message)])
        self._schema = schema

    def _note(self, head: AcceptedHead) -> None:
        self._state.add(head)
        for key in _split(head.keys):
            self._keys[key] = self.number
        self.errors.extend(zip(head.errors, head.weights_hashes, strict=True))

    def _know(self, number: int, record: PartRecord) -> None:
        self.parts[number] = record
        self.lost_ms = max(self.lost_ms, record.lost_ms)
        self._keys |= dict.fromkeys(_split(record.keys), number)

    # Log -> parquet -> keys -> no log.

    def _finish(self, number: int) -> None:
        """Of a log that was sealed when a crash came."""
        log = _open_whole(numbered(self.folder, number))
        state = _LogState()
        for _, body in list(log.frames())[1:]:
            state.add(_read_head(body)[0])
        if state.num_rows:
            if not _is_there(self.part_path(number)):
                self._write_part(number, log)
            self._write_keys(number, state.record())
        log.close()
        numbered(self.folder, number).unlink()

    def _write_part(self, number: int, log: JournalFile) -> None:
        table = _read_log(log)
        assert table is not None, "a log is sealed when it has rows"
        with replacing(self.part_path(number)) as file:
            pq.write_table(table, file)
            failpoint("feedback.part_written")
        failpoint("feedback.part_renamed")

    def _write_keys(self, number: int, record: PartRecord) -> None:
        replace_file(numbered(self.folder, number, KEYS), _encode(record))
        failpoint("feedback.keys_written")
        self._know(number, record)

    def _newest_tables(self) -> Iterator[pa.Table]:
        table = _read_log(self._log)
        if table is not None:
            yield table
        for number in reversed(list_numbers(self.folder, PARQUET)):
            path = self.part_path(number)
            try:
                with os.fdopen(open_regular(path), "rb") as file:
                    yield pq.read_table(file)
            except (OSError, ValueError, pa.ArrowException) as fault:
                logger.warning("%s is left out, it cannot be read: %s", path, fault)

    def _read_keys(self, number: int) -> PartRecord:
        """Where they cannot be read: another record takes their place, which says so."""
        path = numbered(self.folder, number, KEYS)
        try:
            record = _keys_decoder.decode(read_regular(path))
            if not record.is_whole:
                raise ValueError("its checksum is another one")
        except (OSError, ValueError, msgspec.MsgspecError) as fault:
            logger.warning(
                "%s cannot be read: %s; feedback to requests that were answered until now counts as unknown. It is kept"
                " as %s",
                path,
                fault,
                set_aside(path),
            )
            time_ms = now_ms()
            num_rows = _count_rows(self.part_path(number))
            record = PartRecord(
                num_rows=num_rows, oldest_ms=time_ms, newest_request=1 << 62, keys=b"", lost_ms=time_ms
            )
            replace_file(path, _encode(record))
        return record


def _is_there(path: Path) -> bool:
    """Whether there is a file. What else is in its place is set aside."""
    try:
        os.close(open_regular(path))
    except FileNotFoundError:
        return False
    except NotRegularFileError as fault:
        logger.warning("%s; it is kept as %s", fault, set_aside(path))
        return False
    return True


def _open_whole(path: Path) -> JournalFile:
    """A log of whole frames. Where the first one, its schema, cannot be read, the log is set aside: a new one."""
    _is_there(path)
    log = JournalFile(path)
    if log.size and log.read(0) is None:
        log.close()
        logger.error("%s: its first bytes are damaged; it is kept as %s", path, set_aside(path))
        log = JournalFile(path)
    log.cut_tail(keeps=True)
    return log


def _unlink_log(path: Path) -> None:
    if _is_there(path):
        path.unlink()


def _count_rows(path: Path) -> int:
    """Of a parquet file; 0 where it cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return int(pq.read_metadata(file).num_rows)
    except (OSError, ValueError, pa.ArrowException):
        return 0


_encode = msgspec.msgpack.Encoder().encode
_head_decoder = msgspec.msgpack.Decoder(AcceptedHead)
_keys_decoder = msgspec.msgpack.Decoder(PartRecord)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _read_head(body: memoryview) -> tuple[AcceptedHead, memoryview]:
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    return _head_decoder.decode(body[_LENGTH_BYTES:end]), body[end:]


def _read_log(log: JournalFile) -> pa.Table | None:
    """None where it has no rows."""
    frames = log.frames()
    first = next(frames, None)
    if first is None:
        return None
    schema = pa.ipc.read_schema(pa.py_buffer(first[1]))
    batches = [pa.ipc.read_record_batch(pa.py_buffer(_read_head(body)[1]), schema) for _, body in frames]
    return pa.Table.from_batches(batches, schema) if batches else None


def _split(keys: bytes) -> Sequence[bytes]:
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
