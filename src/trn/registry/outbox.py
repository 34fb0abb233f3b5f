"""How far each consumer of a registry's outbox was told: its last change of a run, and a place in each run's file."""

import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from trn.registry.connection import open_reader
from trn.registry.named_queries import sql
from trn.registry.writer import RegistryWriter


class Place(NamedTuple):
    """After the event `seq`, which ends at byte `offset` of the run's file."""

    seq: int = 0
    offset: int = 0


class Backlog(NamedTuple):
    """What a consumer has still to be told."""

    num_runs: int
    num_events: int


class OutboxTable:
    """One consumer's rows. Reads with a connection of its own, for one thread at a time; writes through the writer."""

    def __init__(self, path: Path, writer: RegistryWriter, consumer: str) -> None:
        self._writer = writer
        self._consumer = consumer
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()

    def begin(self) -> "Future[int]":
        """The last change that the consumer was told of; one that is new begins with what changes from now on."""

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
        """The consumer was told of all that; in one transaction."""
        moved = [
            {"run_id": run_id, "consumer": self._consumer, **p._asdict()} for run_id, p in places.items()
        ]

        def apply(connection: sqlite3.Connection) -> None:
            connection.executemany(sql("move_outbox_place"), moved)
            connection.execute(sql("move_outbox_cursor"), {"consumer": self._consumer, "change": change})

        return self._writer.submit(apply)
