"""How far runs were copied into log files: one place for each run and each kind of copy."""

import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from trn.registry.connection import open_reader
from trn.registry.named_queries import sql
from trn.registry.writer import RegistryWriter


class LogPlace(NamedTuple):
    """What a copy has of a run: everything up to here, and nothing after it."""

    seq: int = 0  # the last event
    offset: int = 0  # where it ends in the run's events file
    output_offset: int = 0  # of the run's worker.log
    num_job_lines: int = 0  # 1: that it was accepted; 2: how it ended, too


class LogPlaces:
    """Reads with a connection of its own, for one thread at a time; writes through the writer."""

    def __init__(self, path: Path, writer: RegistryWriter) -> None:
        self._writer = writer
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()

    def of(self, run_id: str) -> dict[str, LogPlace]:
        """By the kind of the copy, as it was committed; kinds that were never written are not there."""
        rows = self._read.execute(sql("log_places"), {"run_id": run_id}).fetchall()
        return {
            row["copy"]: LogPlace(row["seq"], row["offset"], row["output_offset"], row["num_job_lines"])
            for row in rows
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
