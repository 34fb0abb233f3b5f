"""Rows of the registry -> records."""

import sqlite3
from typing import TypeVar

import msgspec

from trn.core.errors import RegistryError
from trn.core.runs import AttemptRecord, QueuedRun, RunRecord

_JSON_COLUMNS = ("cause", "config", "metrics", "devices", "needs", "tags", "secret_env")


def read_run(row: sqlite3.Row) -> RunRecord:
    return _convert(row, RunRecord)


def read_attempt(row: sqlite3.Row) -> AttemptRecord:
    return _convert(row, AttemptRecord)


def read_queued(row: sqlite3.Row) -> QueuedRun:
    return _convert(row, QueuedRun)


R = TypeVar("R", RunRecord, AttemptRecord, QueuedRun)


def _convert(row: sqlite3.Row, record: type[R]) -> R:
    values = dict(row)
    for name in _JSON_COLUMNS:
        if name in values:
            values[name] = msgspec.json.decode(values[name])
    if values.get("options", "{}") != "{}":
        values |= msgspec.json.decode(values["options"])
    if "metrics" in values:  # some may be words
        values["metrics"] = {name: float(value) for name, value in values["metrics"].items()}
    if "is_cancel_wanted" in values:
        values["is_cancel_wanted"] = bool(values["is_cancel_wanted"])
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as fault:
        raise RegistryError(f"the registry holds a record that is not valid: {fault}") from fault
