"""Which run each cancel that came by the bus meant: a command that is read again means the same one."""

import sqlite3
from concurrent.futures import Future
from pathlib import Path

from trn.registry.connection import open_reader
from trn.registry.named_queries import sql
from trn.registry.writer import RegistryWriter

NUM_KEPT = 1000  # commands are answered in order, so an old one is never read again


class BusCancels:
    """Reads with a connection of its own, for one thread; writes through the writer."""

    def __init__(self, path: Path, writer: RegistryWriter) -> None:
        self._writer = writer
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()

    def recall(self, command_id: str, asked: str) -> str:
        """The run, or nothing where this command is new."""
        row = self._read.execute(sql("bus_cancel"), {"command_id": command_id, "asked": asked}).fetchone()
        return "" if row is None else str(row["run_id"])

    def remember(self, command_id: str, asked: str, run_id: str) -> "Future[None]":
        """Durable when the future is done."""

        def change(connection: sqlite3.Connection) -> None:
            values = {"command_id": command_id, "asked": asked, "run_id": run_id}
            connection.execute(sql("remember_bus_cancel"), values)
            connection.execute(sql("forget_bus_cancels"), {"kept": NUM_KEPT})

        return self._writer.submit(change)
