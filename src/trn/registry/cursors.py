"""How far the outlets are, durable in the registry: the event bus, the log files, the bus's cancel commands."""

import sqlite3
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from trn.registry.connection import Source, open_reader
from trn.registry.named_queries import sql
from trn.registry.writer import RegistryWriter

NUM_CANCELS_KEPT = 1000  # commands are answered in order, so an old one is never read again


class _Cursors:
    """Reads with a connection of its own, for one thread at a time; writes through the writer."""

    def __init__(self, path: Source, writer: RegistryWriter) -> None:
        self._writer = writer
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()


class Place(NamedTuple):
    """After the event `seq`, which ends at byte `offset` of the run's file."""

    seq: int = 0
    offset: int = 0


class Backlog(NamedTuple):
    """What a consumer has not been sent yet."""

    num_runs: int
    num_events: int


class OutboxTable(_Cursors):
    """One consumer's rows."""

    def __init__(self, path: Source, writer: RegistryWriter, consumer: str) -> None:
        super().__init__(path, writer)
        self._consumer = consumer

    def begin(self) -> "Future[int]":
        """The last change that the consumer has; a new one starts with the next change."""

        def change(connection: sqlite3.Connection) -> int:
            consumer = {"consumer": self._consumer}
            connection.execute(sql("begin_outbox"), consumer)
            return int(connection.execute(sql("outbox_cursor"), consumer).fetchone()["change"])

        return self._writer.submit(change)

    def place(self, run_id: str) -> Place:
        values = {"consumer": self._consumer, "run_id": run_id}
        row = self._read.execute(sql("outbox_place"), values).fetchone()
        return Place() if row is None else Place(row["seq"], row["offset"])

    def backlog(self, after: int) -> Backlog:
        """What lies beyond the committed places, of runs that changed after that."""
        values = {"consumer": self._consumer, "change": after}
        row = self._read.execute(sql("outbox_backlog"), values).fetchone()
        return Backlog(row["num_runs"], row["num_events"])

    def move(self, places: Mapping[str, Place], change: int) -> "Future[None]":
        """The consumer has all of that; in one transaction."""
        moved = [
            {"run_id": run_id, "consumer": self._consumer, **p._asdict()} for run_id, p in places.items()
        ]

        def apply(connection: sqlite3.Connection) -> None:
            connection.executemany(sql("move_outbox_place"), moved)
            connection.execute(sql("move_outbox_cursor"), {"consumer": self._consumer, "change": change})

        return self._writer.submit(apply)


class LogPlace(NamedTuple):
    """What a copy has of a run: everything up to here, and nothing after it."""

    seq: int = 0  # the last event
    offset: int = 0  # where it ends in the run's events file
    output_offset: int = 0  # of the run's worker.log
    num_job_lines: int = 0  # 1: that it was accepted; 2: how it ended, too


class LogPlaces(_Cursors):
    """How far runs were copied into log files: one place for each run and each kind of copy."""

    def of(self, run_ids: Iterable[str]) -> dict[tuple[str, str], LogPlace]:
        """By (run, kind of copy), as it was committed; kinds that were never written are not there."""
        wanted = {"run_ids": msgspec.json.encode(list(run_ids)).decode()}
        return {
            (run_id, copy): LogPlace(*place)
            for run_id, copy, *place in self._read.execute(sql("log_places"), wanted)
        }

    def log_dirs(self) -> list[str]:
        """Every folder that a run's lines were ever to go to, besides the home's."""
        return [row["log_dir"] for row in self._read.execute(sql("log_dirs"))]

    def move(self, places: Mapping[tuple[str, str], LogPlace]) -> "Future[None]":
        """By (run, kind of copy), in one transaction."""
        rows = [{"run_id": run_id, "copy": copy, **p._asdict()} for (run_id, copy), p in places.items()]

        def change(connection: sqlite3.Connection) -> None:
            connection.executemany(sql("move_log_place"), rows)

        return self._writer.submit(change)


class BusCancels(_Cursors):
    """Which run each cancel from the bus meant: a command that is read again means the same one."""

    def recall(self, command_id: str, asked: str) -> str:
        """The run, or nothing where this command is new."""
        row = self._read.execute(sql("bus_cancel"), {"command_id": command_id, "asked": asked}).fetchone()
        return "" if row is None else str(row["run_id"])

    def remember(self, command_id: str, asked: str, run_id: str) -> "Future[None]":
        """Durable when the future is done."""

        def change(connection: sqlite3.Connection) -> None:
            values = {"command_id": command_id, "asked": asked, "run_id": run_id}
            connection.execute(sql("remember_bus_cancel"), values)
            connection.execute(sql("forget_bus_cancels"), {"kept": NUM_CANCELS_KEPT})

        return self._writer.submit(change)
