"""One run and all that the registry holds of it, read without a daemon."""

import sqlite3
import threading
from typing import NamedTuple

from trn.client.cli.registry_view import open_read_only
from trn.core.errors import NotFoundError, RegistryError
from trn.core.home import Home
from trn.core.runs import AttemptRecord, RunRecord
from trn.registry.metrics import MetricReader, Series
from trn.registry.reader import RegistryReader


class FoundRun(NamedTuple):
    """A run, its attempts, and which runs hold devices now."""

    run: RunRecord
    attempts: list[AttemptRecord]
    holders: list[str]


class _Reader(RegistryReader):
    """As its base, also in a home that cannot be written."""

    def __init__(self, home: Home) -> None:
        self._read = open_read_only(str(home.registry))
        self._read.row_factory = sqlite3.Row


class _MetricReader(MetricReader):
    """The same."""

    def __init__(self, home: Home) -> None:
        self._read = open_read_only(str(home.metrics))
        self._read.row_factory = sqlite3.Row
        self._reading = threading.Lock()


def find_metrics(home: Home, run_id: str, *, max_points: int) -> dict[str, Series]:
    """Its metrics by name, thinned out; none where there is no file of them, or it cannot be read."""
    if not home.metrics.exists():
        return {}
    try:
        reader = _MetricReader(home)
        try:
            return {series.name: series for series in reader.query(run_id, max_points=max_points)}
        finally:
            reader.close()
    except sqlite3.Error:
        return {}


def find_run(home: Home, run_id: str) -> FoundRun:
    """By id or unique prefix. NotFoundError, AmbiguousError, RegistryError."""
    if not home.registry.exists():
        raise NotFoundError(f"there is no run {run_id!r}: nothing was ever submitted to {home.root}")
    try:
        reader = _Reader(home)
        try:
            run = reader.get(run_id)
            holders = [slot["run_id"] for slot in reader.slots() if slot["run_id"]]
            return FoundRun(run, reader.attempts(run.run_id), holders)
        finally:
            reader.close()
    except sqlite3.Error as fault:
        raise RegistryError(
            f"{home.registry} cannot be read: {fault}; `python -m trn.daemon check` looks through it"
        ) from fault
