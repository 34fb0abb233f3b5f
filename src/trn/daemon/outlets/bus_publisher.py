"""Publishes every event and every change of state on the bus: at least once, in order for each run.

While the bus is not available, nothing is held in memory. Events stay in the outbox, which means in the runs' files, and no other
part of the daemon is affected.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable

import msgspec

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.failpoints import failpoint
from trn.core.errors import BusUnavailableError, TrnError
from trn.core.number_words import with_words
from trn.core.runs import RunRecord
from trn.daemon.ingest.event_file import EventBatch
from trn.daemon.outlets.event_bus import EventBus, EventMessage, Message, RunMessage
from trn.daemon.outlets.outbox import Outbox, Place
from trn.daemon.outlets.threaded_part import ThreadedPart

logger = logging.getLogger("trn.bus")

PAGE = 500  # runs
MAX_BYTES = 1 << 20  # of events at a time, and a batch more
COMMIT_EVERY_S = 0.2
SETTLE_S = 0.005  # after a wake: what is committed meanwhile is published with it
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # while the bus is not available


class _Name(msgspec.Struct, frozen=True, gc=False):
    """The fields of an event that a message needs."""

    seq: int
    event: str


_decode_names = msgspec.json.Decoder(_Name).decode_lines


class BusPublisher(ThreadedPart):
    thread_name = "event-bus"
    stop_s = 2.0  # also for the last messages

    def __init__(
        self, *, outbox: Outbox, bus: EventBus, shown: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._outbox = outbox
        self._bus = bus
        self._shown = shown
        self._clock = clock
        self._states: dict[str, tuple[str, int]] = {}  # of live runs, as they were published last
        self._messages: list[Message] = []  # gathered, not published yet
        self._num_bytes = 0
        self._places: dict[str, Place] = {}  # valid once the messages are published
        self._is_moved = False  # since the last commit
        self._committed_at = -COMMIT_EVERY_S
        self._is_connected = False
        self._away_since: float | None = None

    def publish_changes(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Publish everything, or until `is_over`. BusUnavailableError if the bus is not available."""
        try:
            while not is_over() and (runs := self._outbox.changed_runs(PAGE)):
                cursor = self._outbox.cursor
                for run in runs:
                    self._gather(run, cursor, is_over)
                    if is_over():
                        return
                    cursor = run.change
                self._flush(cursor)
                for run in runs:
                    if run.state.is_terminal:
                        self._states.pop(run.run_id, None)
                        self._outbox.forget(run.run_id)
        finally:
            self._drop()

    def commit(self) -> None:
        """Commit in the outbox what was published. If that fails, some of it is published again."""
        if self._is_moved:
            self._is_moved = False
            self._committed_at = self._clock()
            self._outbox.commit()

    def _gather(self, run: RunRecord, cursor: int, is_over: Callable[[], bool]) -> None:
        """Its events, then its state; published as soon as it is much. `cursor` is the change of the run before."""
        for batch, end in self._outbox.batches(run, self._outbox.place(run.run_id)):
            self._messages += _event_messages(run.run_id, batch)
            self._num_bytes += len(batch.lines)
            self._places[run.run_id] = Place(batch.last_seq, end)
            if self._num_bytes >= MAX_BYTES:
                self._flush(cursor)
                if is_over():
                    return
        state = run.state.value, run.attempt
        if self._states.get(run.run_id) != state:
            self._messages.append(RunMessage(run.run_id, run.state.value, run.change, _encode_record(run)))
            self._states[run.run_id] = state

    def _flush(self, cursor: int) -> None:
        """Publish what was gathered, and commit it if that is due."""
        if self._messages:
            self._bus.publish(self._messages)
            failpoint("bus.published")
        self._outbox.advance(self._places, cursor)
        self._is_moved = True
        self._messages, self._num_bytes, self._places = [], 0, {}
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._clock() - self._committed_at >= COMMIT_EVERY_S:
            self.commit()

    def _drop(self) -> None:
        """Forget what was gathered and not published; it is read again later."""
        for message in self._messages:
            if isinstance(message, RunMessage):
                self._states.pop(message.run_id, None)
        self._messages, self._num_bytes, self._places = [], 0, {}

    def work(self, stop: threading.Event) -> None:
        """Publish until `stop`; then once more, for a short time."""
        pause = DoublingDelay(FIRST_PAUSE_S, MAX_PAUSE_S)
        try:
            while not stop.is_set():
                try:
                    if not self._is_connected:
                        self._bus.publish(())
                        self._note_back()
                    self.publish_changes(stop.is_set)
                except Exception as fault:
                    self._note_away(fault)
                    stop.wait(pause.next_s())
                    continue
                pause.reset()
                if self._is_moved:
                    self._wake.wait(COMMIT_EVERY_S)
                    self._commit_if_due()
                else:
                    self._wake.wait()
                stop.wait(SETTLE_S)
                self._wake.clear()  # before reading: what is committed from here on wakes again
            self._publish_last()
        finally:
            self._outbox.close()
            self._bus.close()

    def _publish_last(self) -> None:
        """The daemon stops: what cannot be published quickly is left for the next daemon."""
        if self._is_connected:
            deadline = self._clock() + self.stop_s / 2
            try:
                self.publish_changes(lambda: self._clock() >= deadline)
                self.commit()
            except Exception as fault:
                logger.warning("the event bus %s: %s; the next daemon continues", self._shown, _text(fault))

    def _note_away(self, fault: Exception) -> None:
        """Once in the log, and in the warnings for as long as it lasts."""
        self._is_connected = False
        if self._away_since is None:
            self._away_since = self._clock()
            logger.warning(
                "the event bus %s is not available: %s; events are kept and published later",
                self._shown,
                _text(fault),
                exc_info=None if isinstance(fault, BusUnavailableError) else fault,
            )
        away_s = self._clock() - self._away_since
        self.warnings = [
            f"the event bus {self._shown} has not been available for {away_s:.0f} s: {_text(fault)};"
            f" not published yet: {self._backlog_text()}"
        ]

    def _note_back(self) -> None:
        self._is_connected, self.warnings = True, []
        if self._away_since is not None:
            away_s, self._away_since = self._clock() - self._away_since, None
            logger.info(
                "the event bus %s is available again after %.1f s; not published yet: %s",
                self._shown,
                away_s,
                self._backlog_text(),
            )

    def _backlog_text(self) -> str:
        try:
            backlog = self._outbox.backlog()
        except (sqlite3.Error, TrnError) as fault:
            return f"events ({fault})"
        return f"{_count(backlog.num_events, 'event')} of {_count(backlog.num_runs, 'run')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(fault: Exception) -> str:
    """The text of an error that is not ours may hold the URL with its password."""
    return str(fault) if isinstance(fault, TrnError) else type(fault).__name__


def _event_messages(run_id: str, batch: EventBatch) -> list[EventMessage]:
    names = _decode_names(batch.lines)
    lines = batch.lines.split(b"\n")[:-1]
    return [EventMessage(run_id, name.seq, name.event, line) for name, line in zip(names, lines, strict=True)]


def _encode_record(run: RunRecord) -> bytes:
    record = msgspec.structs.asdict(run)
    del record["config"]
    record["metrics"] = with_words(run.metrics)
    return msgspec.json.encode(record)
