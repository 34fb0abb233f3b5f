"""The outbox of one consumer: events and run changes that it has not confirmed. At least once, in order for each run.

It holds places, not copies. The events are in the runs' files, and the registry says up to where it has committed them.
The consumer has still to get what lies between its own place and there. After a crash it gets again what it did not
confirm.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from trn.core.errors import TrnError
from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import EventBatch, is_line_start, last_seq_before, read_chunks
from trn.executors.base import FilesByPool, RunFile
from trn.registry.base import Registry
from trn.registry.cursors import Backlog, Place

__all__ = ["Backlog", "Outbox", "Place"]


class Outbox:
    """For one thread at a time, not the loop's: reading `cursor` the first time waits for a commit.

    A new consumer gets what changes from now on: all events of live runs, none of runs that have ended.
    """

    def __init__(self, registry: Registry, files: FilesByPool, consumer: str) -> None:
        self._files = files
        self._reader = registry.reader()
        self._table = registry.outbox(consumer)
        self._begun = self._table.begin()
        self._cursor: int | None = None
        self._places: dict[str, Place] = {}  # of live runs, also where they are not committed yet
        self._moved: dict[str, Place] = {}  # not committed yet

    def close(self) -> None:
        self._reader.close()
        self._table.close()

    @property
    def cursor(self) -> int:
        """The last change of a run that the consumer has confirmed."""
        if self._cursor is None:
            try:
                self._cursor = self._begun.result()
            except TrnError:
                self._begun = self._table.begin()
                raise
        return self._cursor

    def changed_runs(self, limit: int = 500) -> list[RunRecord]:
        """Runs that changed after the cursor, in the order of their changes, as they are now. Without configs."""
        return self._reader.changed(self.cursor, limit)

    def backlog(self) -> Backlog:
        """How much is not confirmed yet, as far as that is committed."""
        return self._table.backlog(self.cursor)

    def place(self, run_id: str) -> Place:
        """Up to where the consumer has the run's events."""
        if run_id not in self._places:
            self._places[run_id] = self._table.place(run_id)
        return self._places[run_id]

    def batches(self, run: RunRecord, place: Place) -> Iterator[tuple[EventBatch, int]]:
        """(whole events, where they end) after the place, as far as the registry has committed. Reads as it is iterated.

        If the file has lost events (a power cut) and uses their numbers again, this starts at an earlier place that is
        still valid: the consumer gets the events after it again.
        """
        if place.offset == run.event_offset:
            return
        file = self._files.of(run.needs.pool).events(run.run_id)
        seq, offset = self._valid_place(run, file, place)
        for chunk in read_chunks(file, offset, run.event_offset, seq, run.nonce):
            yield chunk.batch, chunk.ends[-1]

    def advance(self, places: Mapping[str, Place], cursor: int) -> None:
        """The consumer confirms everything up to there. Durable with the next `commit`."""
        self._places.update(places)
        self._moved.update(places)
        self._cursor = cursor

    def commit(self) -> "Future[None]":
        """Durable when the future is done. Not for every event: a few times a second."""
        moved, self._moved = self._moved, {}
        return self._table.move(moved, self.cursor)

    def forget(self, run_id: str) -> None:
        """The run has ended and everything is confirmed: from now on only the registry knows its place."""
        self._places.pop(run_id, None)

    def _valid_place(self, run: RunRecord, file: RunFile, place: Place) -> Place:
        """This place if its event is still there, else the last one before it that the registry knows."""
        while place.offset and (place.offset > run.event_offset or not _is_valid(file, place, run.nonce)):
            place = Place(*self._reader.event_place(run.run_id, place.seq - 1))
        return place


def _is_valid(file: RunFile, place: Place, nonce: str) -> bool:
    return is_line_start(file, place.offset) and last_seq_before(file, place.offset, nonce) == place.seq
