"""The state of a run that Ingest follows. All of it can be restored from the stores and the file."""

import asyncio
import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gen_worker.contract.files.regular import open_regular, read_regular
from trn.daemon.ingest.event_file import SHOWN_BYTES, Batch, Damage, is_line_start, last_seq_before
from trn.executors.base import RunFile
from trn.registry.metrics import Place

MAX_DAMAGED_BYTES = 16 << 20  # of saved lines; more are only counted


class FollowedRun:
    """Everything before `offset` of the file is in both stores.

    The event `read_seq` is the last one before it and ends at `event_end`; only lines that were set aside lie between.
    """

    def __init__(self, run_id: str, file: RunFile, damaged: "DamagedLines", number: int, now: float) -> None:
        self.run_id = run_id
        self.file = file
        self.number = number
        self.is_open = False  # place and nonce are read from the stores
        self.nonce = ""
        self.offset = 0
        self.event_end = 0
        self.read_seq = 0
        self.registry_seq = 0  # the last event in the registry, by the numbers of the file
        self.metrics_seq = 0
        self.stored_seq = 0  # the registry's own number; higher if the file has lost events
        self.step = 0
        self.is_rewinding = False  # reads known events again, to find where they end
        self.size_bytes = -1
        self.grown_at = now
        self.is_queued = False
        self.is_busy = False
        self.is_rung = False  # while busy
        self.fault = ""
        self.is_store_behind = False  # the metric store failed; it catches up later
        self.store_again_at = 0.0
        self.num_reads = 0
        self.drains: list[Drain] = []
        self.damaged = damaged
        self.num_damaged_logged = 0

    @property
    def is_idle(self) -> bool:
        """Nothing of it is read or committed now, or is to be."""
        return self.is_open and not (self.is_busy or self.is_queued or self.is_rewinding or self.fault)

    def move_to(self, place: Place) -> None:
        """Continue reading at the end of another event."""
        self.offset = self.event_end = place.offset
        self.read_seq = place.last_seq

    def fail_drains(self, fault: Exception) -> None:
        for drain in self.drains:
            if not drain.done.done():
                drain.done.set_exception(fault)


class Drain:
    """A caller waits until everything that is in the file now is committed and published."""

    def __init__(self, tail: FollowedRun, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.num_reads = tail.num_reads
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def is_over(self, tail: FollowedRun, batch: Batch) -> bool:
        # A read that began earlier may have seen a longer file.
        return tail.num_reads > self.num_reads and (batch.is_end or tail.offset >= self.size_bytes)


def file_size(file: RunFile) -> int:
    """In bytes; 0 if it is not there or cannot be looked at: reading it raises the fault."""
    with contextlib.suppress(OSError):
        return file.size()
    return 0


# Run files are opened in other threads: a slow disk must not block the loop.


async def last_seq(tail: FollowedRun, offset: int) -> int:
    """The number of the last event that ends at or before the offset; 0 if there is none."""
    if offset == 0:
        return 0
    return await asyncio.to_thread(last_seq_before, tail.file, offset, tail.nonce)


async def is_valid(tail: FollowedRun, place: Place) -> bool:
    """Whether the place still is the end of the event that it was."""
    return await is_between_lines(tail, place.offset) and await last_seq(tail, place.offset) == place.last_seq


async def is_between_lines(tail: FollowedRun, offset: int) -> bool:
    """Whether a line begins there."""
    return offset == 0 or await asyncio.to_thread(is_line_start, tail.file, offset)


class DamagedLines:
    """Keeps lines that are not events in a file beside the events; each once, up to a maximum of bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[tuple[int, int]] | None = None
        self.num_lines = 0  # new since the start

    def add(self, damaged: Sequence[Damage]) -> None:
        if self._known is None:
            self._known = set(self._read_known())
        fresh = {(damage.offset, zlib.crc32(damage.line)): damage for damage in damaged}
        fresh = {key: damage for key, damage in fresh.items() if key not in self._known}
        self.num_lines += len(fresh)
        if not fresh:
            return
        with os.fdopen(open_regular(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            if os.fstat(file.fileno()).st_size > MAX_DAMAGED_BYTES:
                return
            file.write(b"".join(_record(damage, key[1]) for key, damage in fresh.items()))
        self._known.update(fresh)

    def _read_known(self) -> Iterator[tuple[int, int]]:
        try:
            known = read_regular(self._path, 2 * MAX_DAMAGED_BYTES)
        except FileNotFoundError:
            return
        for line in known.split(b"\n"):
            try:
                record = msgspec.json.decode(line)
                yield record["offset"], record["crc32"]
            except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
                continue


def _record(damage: Damage, crc32: int) -> bytes:
    record = {
        "offset": damage.offset,
        "size_bytes": damage.size_bytes,
        "reason": damage.reason,
        "crc32": crc32,
        "line": damage.line[:SHOWN_BYTES].decode("utf-8", "backslashreplace").rstrip("\n"),
    }
    return msgspec.json.encode(record) + b"\n"
