"""Rows of the registry -> records; and those rows that every change looks up."""

import sqlite3
from typing import TypeVar

import msgspec

from trn.core.artifacts.records import ArtifactRecord
from trn.core.errors import ConflictError, NotFoundError, RegistryError
from trn.core.runs import AttemptRecord, QueuedRun, RunRecord
from trn.registry.connection import WriterConnection
from trn.registry.named_queries import sql

_JSON_COLUMNS = ("cause", "config", "metrics", "devices", "needs", "tags", "secret_env")


_decode = msgspec.json.Decoder().decode


def read_run(row: sqlite3.Row) -> RunRecord:
    return _convert(row, RunRecord)


def read_attempt(row: sqlite3.Row) -> AttemptRecord:
    return _convert(row, AttemptRecord)


def read_queued(row: sqlite3.Row) -> QueuedRun:
    return _convert(row, QueuedRun)


def read_artifact(row: sqlite3.Row) -> ArtifactRecord:
    return _convert(row, ArtifactRecord)


R = TypeVar("R", RunRecord, AttemptRecord, QueuedRun, ArtifactRecord)


def _convert(row: sqlite3.Row, record: type[R]) -> R:
    values = dict(zip(row.keys(), row, strict=True))  # `dict(row)` looks up each name in the list of all
    for name in _JSON_COLUMNS:
        if name in values:
            values[name] = _decode(values[name])
    if values.get("options", "{}") != "{}":
        values |= _decode(values["options"])
    if "metrics" in values:  # some may be words
        values["metrics"] = {name: float(value) for name, value in values["metrics"].items()}
    if "is_cancel_wanted" in values:
        values["is_cancel_wanted"] = bool(values["is_cancel_wanted"])
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as fault:
        raise RegistryError(f"the registry holds a record that is not valid: {fault}") from fault


def get_run(connection: sqlite3.Connection, run_id: str) -> RunRecord:
    row = connection.execute(sql("run"), {"run_id": run_id}).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return read_run(row)


def attempt_row(connection: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        sql("attempt"), {"run_id": run_id, "number": number}
    ).fetchone()
    if row is None:
        raise NotFoundError(f"run {run_id} has no attempt {number}")
    return row


def require_live(connection: sqlite3.Connection, run_id: str, number: int) -> None:
    if attempt_row(connection, run_id, number)["ended_ms"] is not None:
        raise ConflictError(f"attempt {number} of run {run_id} has ended")


def next_change(connection: sqlite3.Connection) -> int:
    """Counted in memory, since there is one writer. A transaction that is taken back leaves a gap."""
    assert isinstance(connection, WriterConnection)
    if connection.last_change is None:
        connection.last_change = int(connection.execute(sql("last_change")).fetchone()["value"])
    connection.last_change += 1
    return connection.last_change
