"""The outbox: what one consumer has still to be told, at least once and in order for each run.

It holds places, not copies. A run's events are in its file, and the registry says up to where it has taken them in;
what lies between a consumer's place and there is in its outbox. A consumer that was told says so with `told`; one that
dies in between is told again what it had not confirmed.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec

from gen_worker.contract.regular_files import NotRegularFileError, open_regular
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import (
    EventBatch,
    Head,
    is_line_start,
    last_seq_before,
    parse,
    read_batch,
    split,
)
from trn.registry.outbox import Backlog, OutboxTable, Place
from trn.registry.reader import RegistryReader
from trn.registry.sqlite import RunRegistry

__all__ = ["Backlog", "Outbox", "Place"]

PEEK_BYTES = 4 << 10

_decode_head = msgspec.json.Decoder(Head).decode


class Outbox:
    """One consumer's outbox, for one thread at a time: not the loop's, for the first question waits for a commit.

    A consumer that was never seen before is told of what changes from now on; of a run that is live by then it is told
    from the first event, of one that has ended nothing.
    """

    def __init__(self, registry: RunRegistry, home: Home, consumer: str) -> None:
        self._home = home
        self._reader = RegistryReader(home.registry)
        self._table = OutboxTable(home.registry, registry.writer, consumer)
        self._begun = self._table.begin()  # now, but it is waited for in the thread that asks for news
        self._told_change: int | None = None
        self._places: dict[str, Place] = {}  # of live runs, also where they are not committed yet
        self._moved: dict[str, Place] = {}  # not committed yet

    def close(self) -> None:
        self._reader.close()
        self._table.close()

    @property
    def change(self) -> int:
        """The last change that the consumer was told of, as `told` said it."""
        if self._told_change is None:
            try:
                self._told_change = self._begun.result()
            except TrnError:
                self._begun = self._table.begin()
                raise
        return self._told_change

    def news(self, limit: int = 500) -> list[RunRecord]:
        """Runs that changed after what was told, in the order of their changes, each as it is now. Without configs."""
        return self._reader.changed(self.change, limit)

    def backlog(self) -> Backlog:
        """How much there is still to be told, as far as it was committed."""
        return self._table.backlog(self.change)

    def place(self, run_id: str) -> Place:
        """Up to where the consumer was told of the run's events; the beginning where of none."""
        place = self._places.get(run_id)
        if place is None:
            place = self._places[run_id] = self._table.place(run_id)
        return place

    def batches(self, run: RunRecord, place: Place) -> Iterator[tuple[EventBatch, int]]:
        """(whole events, where they end) after the place, up to what the registry has taken in. Reads as it is iterated.

        Where the file has lost events (a power cut) and goes on with numbers that were used before, it begins again at
        a place that still stands: those after it are told once more.
        """
        path = self._home.run(run.run_id).events
        if place.offset == run.event_offset:
            return
        if place.offset > run.event_offset or not _goes_on(path, place):
            place = self._standing_place(run, path, place)
        seq, offset = place
        while offset < run.event_offset:
            batch = read_batch(path, offset)
            for start, lines in split(batch.lines[: run.event_offset - offset]):
                chunk = parse(lines, offset + start, seq, run.nonce)
                if chunk.events:
                    seq = chunk.events[-1].seq
                    yield chunk.batch, chunk.ends[-1]
            if batch.next_offset == offset:
                return  # the file is gone, or shorter than it was
            offset = batch.next_offset

    def advance(self, places: Mapping[str, Place], change: int) -> None:
        """The consumer has all up to there; `change` is that of the last of the news. Durable with the next `told`."""
        self._places.update(places)
        self._moved.update(places)
        self._told_change = change

    def told(self, places: Mapping[str, Place], change: int) -> "Future[None]":
        """`advance`, and commit it: durable when the future is done. Not for every event: a few times a second."""
        self.advance(places, change)
        moved, self._moved = self._moved, {}
        return self._table.move(moved, change)

    def forget(self, run_id: str) -> None:
        """The run has ended and was told of: from here on the registry alone remembers its place."""
        self._places.pop(run_id, None)

    def _standing_place(self, run: RunRecord, path: Path, place: Place) -> Place:
        """This place if its event is still where it was, else the last one before it that the registry knows of."""
        while place.offset and (place.offset > run.event_offset or not _stands(path, place, run.nonce)):
            seq, offset = self._reader.event_place(run.run_id, place.seq - 1)
            place = Place(seq, offset)
        return place


def _goes_on(path: Path, place: Place) -> bool:
    """Whether the very next line is the next event: then the place stands, and that is seen without looking back."""
    before = min(place.offset, 1)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            data = os.pread(file.fileno(), PEEK_BYTES, place.offset - before)
    except (FileNotFoundError, NotRegularFileError):
        return False
    if before and data[:1] != b"\n":
        return False
    line = data[before : data.find(b"\n", before)]
    try:
        return _decode_head(line).seq == place.seq + 1
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _stands(path: Path, place: Place, nonce: str) -> bool:
    return is_line_start(path, place.offset) and last_seq_before(path, place.offset, nonce) == place.seq
