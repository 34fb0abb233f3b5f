"""RunRegistry on SQLite. Changes go through one writer and are durable when they return; reads have their own file
handle and wait for nobody.

Every change of a run's state passes `_move`, which asks the transition table; slots are taken and freed in the same
transaction as the state that says so.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trn.core.errors import AmbiguousError, ConflictError, NotFoundError, RegistryError
from trn.core.runs import AttemptRecord, Needs, RunRecord, RunState, require_transition
from trn.registry.connection import migrate, open_reader, open_writer
from trn.registry.named_queries import sql
from trn.registry.writer import RegistryWriter

MAX_PAGE = 1000

_encode = msgspec.json.encode


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is submitted."""

    run_id: str
    digest: str
    config: dict[str, Any]
    name: str = ""
    priority: int = 0
    parent_run_id: str = ""
    snapshot: str = ""
    base_dir: str = ""
    max_attempts: int = 1
    needs: Needs = Needs()
    tags: dict[str, str] = {}


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and what that makes of the run. A retry goes back to PENDING."""

    state: RunState
    reason: str
    cause: str
    category: str = ""
    exit_code: int | None = None
    not_before_ms: int = 0


class RegistryReader:
    """Reads of the registry; used by the daemon, and by commands while there is none."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise NotFoundError(f"there is no registry at {path}: nothing was ever submitted here")
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()

    def get(self, run_id: str) -> RunRecord:
        """By id, or by a prefix that only one run has."""
        row = self._read.execute(sql("run"), {"run_id": run_id}).fetchone()
        if row is not None:
            return _run(row)
        rows = self._read.execute(sql("runs_with_prefix"), {"prefix": run_id}).fetchall() if run_id else []
        if len(rows) == 1:
            return _run(rows[0])
        if rows:
            names = ", ".join(row["run_id"] for row in rows)
            raise AmbiguousError(f"{run_id!r} is the beginning of several runs: {names}; give more of it")
        raise NotFoundError(f"there is no run {run_id!r}: `trn list` shows those that there are")

    def page(
        self,
        *,
        states: Sequence[RunState] = (),
        name: str = "",
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[RunRecord]:
        """The newest first; `before` is (submitted_ms, run_id) of the last one of the page before."""
        before_ms, before_id = before or (1 << 62, "")
        rows = self._read.execute(
            sql("page"),
            {
                "state_words": f"|{'|'.join(states)}|" if states else "",
                "name": name,
                "before_ms": before_ms,
                "before_id": before_id,
                "limit": min(max(limit, 1), MAX_PAGE),
            },
        )
        return [_run(row) for row in rows]

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        return [_attempt(row) for row in self._read.execute(sql("attempts"), {"run_id": run_id})]

    def queue(self, limit: int) -> list[RunRecord]:
        """Pending runs, in the order in which they are to start."""
        return [_run(row) for row in self._read.execute(sql("queue"), {"limit": limit})]

    def live(self) -> list[RunRecord]:
        return [_run(row) for row in self._read.execute(sql("live"))]

    def changed(self, after: int, limit: int = 500) -> list[RunRecord]:
        """Runs whose last change is after that one, in the order of the changes."""
        return [_run(row) for row in self._read.execute(sql("changed"), {"after": after, "limit": limit})]

    def last_change(self) -> int:
        return int(self._read.execute(sql("last_change")).fetchone()["value"])

    def counts(self) -> dict[str, int]:
        return {row["state"]: row["num"] for row in self._read.execute(sql("counts"))}

    def slots(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._read.execute(sql("slots"))]

    def held(self) -> tuple[int, int]:
        """(cpus, memory_mb) that live attempts hold."""
        row = self._read.execute(sql("held")).fetchone()
        return int(row["cpus"]), int(row["memory_mb"])

    def check_integrity(self) -> list[str]:
        """What SQLite itself finds wrong; empty where all is well."""
        found = [row[0] for row in self._read.execute("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found


class RunRegistry(RegistryReader):
    """The daemon's registry. There is one of these for a home, in one process."""

    def __init__(
        self, path: Path, *, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        connection = open_writer(path)
        try:
            migrate(connection, "trn.registry.migrations")
        except BaseException:
            connection.close()
            raise
        self._path = path
        self._clock_ms = clock_ms
        self._connection = connection
        self.writer = RegistryWriter(connection)
        super().__init__(path)

    def close(self) -> None:
        self.writer.close()
        super().close()

    def submit(self, new: NewRun, *, is_another_wanted: bool = False) -> "Future[tuple[RunRecord, bool]]":
        """(the run, whether an equal one existed). Safe to repeat: an equal digest returns what there is."""

        def change(connection: sqlite3.Connection) -> tuple[RunRecord, bool]:
            if not is_another_wanted:
                row = connection.execute(sql("newest_of_digest"), {"digest": new.digest}).fetchone()
                if row is not None:
                    return _run(row), True
            if connection.execute(sql("run"), {"run_id": new.run_id}).fetchone() is not None:
                raise ConflictError(
                    f"there is a run {new.run_id!r} with another config: give this one another run_id"
                )
            connection.execute(
                sql("add_run"),
                {
                    "run_id": new.run_id,
                    "digest": new.digest,
                    "reason": "waits for the dispatcher",
                    "config": _encode(new.config).decode(),
                    "name": new.name,
                    "priority": new.priority,
                    "parent_run_id": new.parent_run_id,
                    "snapshot": new.snapshot,
                    "base_dir": new.base_dir,
                    "now_ms": self._clock_ms(),
                    "max_attempts": new.max_attempts,
                    "needs": _encode(new.needs).decode(),
                    "tags": _encode(new.tags).decode(),
                    "change": _next_change(connection),
                },
            )
            return _get(connection, new.run_id), False

        return self.writer.submit(change)

    def want_cancel(self, run_id: str, reason: str) -> "Future[tuple[RunRecord, bool]]":
        """Record that it is to end; a run that waits ends at once. (the run, whether it was still live)."""

        def change(connection: sqlite3.Connection) -> tuple[RunRecord, bool]:
            run = _get(connection, run_id)
            if run.state.is_terminal:
                return run, False
            values = {"run_id": run_id, "reason": reason, "now_ms": self._clock_ms()}
            connection.execute(sql("want_cancel"), {**values, "change": _next_change(connection)})
            if run.state is RunState.PENDING:
                self._move(connection, run, RunState.CANCELLED, reason)
            return _get(connection, run_id), True

        return self.writer.submit(change)

    def claim(self, run_id: str, device_ids: Sequence[str]) -> "Future[AttemptRecord]":
        """Take a pending run and its slots together, or neither: ConflictError where one of them is gone."""

        def change(connection: sqlite3.Connection) -> AttemptRecord:
            run = _get(connection, run_id)
            if run.is_cancel_wanted:
                raise ConflictError(f"run {run_id} is to be cancelled")
            number, now_ms = run.attempt + 1, self._clock_ms()
            self._move(connection, run, RunState.DISPATCHING, f"attempt {number} is being launched")
            held = {"run_id": run_id, "attempt": number}
            for device_id in device_ids:
                taken = connection.execute(
                    sql("take_slot"), {**held, "device_id": device_id, "now_ms": now_ms}
                )
                if taken.rowcount != 1:
                    raise ConflictError(f"the slot {device_id} is not free any more")
            needs = {"cpus": run.needs.cpus, "memory_mb": run.needs.memory_mb}
            connection.execute(sql("hold"), {**held, **needs})
            devices = _encode(list(device_ids)).decode()
            connection.execute(sql("hold_run"), {**held, "devices": devices})
            connection.execute(
                sql("add_attempt"), {"run_id": run_id, "number": number, "now_ms": now_ms, "devices": devices}
            )
            return _attempt(_attempt_row(connection, run_id, number))

        return self.writer.submit(change)

    def launched(
        self, run_id: str, number: int, *, boot_id: str, pid: int, start_ticks: int | None
    ) -> "Future[RunRecord]":
        """The attempt has a process."""

        def change(connection: sqlite3.Connection) -> RunRecord:
            _require_live(connection, run_id, number)
            named = {"boot_id": boot_id, "pid": pid, "start_ticks": start_ticks, "now_ms": self._clock_ms()}
            connection.execute(sql("launched"), {"run_id": run_id, "number": number, **named})
            run = _get(connection, run_id)
            if run.state is RunState.DISPATCHING:
                self._move(connection, run, RunState.RUNNING, f"attempt {number} runs as process {pid}")
            return _get(connection, run_id)

        return self.writer.submit(change)

    def follow(
        self,
        run_id: str,
        number: int,
        *,
        offset: int,
        last_seq: int,
        step: int,
        heartbeat_ms: int,
        metrics: Mapping[str, float],
        end_step: int | None = None,
    ) -> "Future[RunRecord]":
        """Events up to `offset` bytes of the run's file are taken in, exactly once."""

        def change(connection: sqlite3.Connection) -> RunRecord:
            attempt = _attempt(_attempt_row(connection, run_id, number))
            if offset <= attempt.event_offset:
                return _get(connection, run_id)  # an ingest that was repeated after a lost reply
            place = {"run_id": run_id, "number": number, "offset": offset, "step": step}
            connection.execute(sql("follow"), {**place, "heartbeat_ms": heartbeat_ms})
            run = _get(connection, run_id)
            connection.execute(
                sql("progress"),
                {
                    "run_id": run_id,
                    "step": step,
                    "end_step": end_step,
                    "last_seq": last_seq,
                    "metrics": _encode({**run.metrics, **metrics}).decode(),
                    "now_ms": self._clock_ms(),
                    "change": _next_change(connection),
                },
            )
            return _get(connection, run_id)

        return self.writer.submit(change)

    def end(self, run_id: str, number: int, ending: Ending) -> "Future[RunRecord]":
        """End an attempt: its slots are freed and the run moves on, in one transaction. Safe to repeat."""

        def change(connection: sqlite3.Connection) -> RunRecord:
            ended = connection.execute(
                sql("end_attempt"),
                {
                    "run_id": run_id,
                    "number": number,
                    "now_ms": self._clock_ms(),
                    "exit_code": ending.exit_code,
                    "category": ending.category,
                    "cause": ending.cause,
                },
            )
            run = _get(connection, run_id)
            if ended.rowcount == 0:
                return run  # it was ended before: slots are freed exactly once
            held = {"run_id": run_id, "attempt": number}
            connection.execute(sql("free_slots"), held)
            connection.execute(sql("let_go"), held)
            self._move(connection, run, ending.state, ending.reason, not_before_ms=ending.not_before_ms)
            return _get(connection, run_id)

        return self.writer.submit(change)

    def set_slots(self, device_ids: Sequence[str]) -> "Future[None]":
        """Make sure that each of these devices has a slot."""

        def change(connection: sqlite3.Connection) -> None:
            for device_id in device_ids:
                connection.execute(sql("add_slot"), {"device_id": device_id})

        return self.writer.submit(change)

    def quarantine(self, device_id: str, reason: str) -> "Future[None]":
        """Keep a slot from being handed out; an empty reason hands it out again."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(sql("quarantine"), {"device_id": device_id, "reason": reason})

        return self.writer.submit(change)

    def checkpoint_wal(self) -> tuple[int, int, int]:
        """(busy, frames in the log, frames checkpointed), as SQLite says."""

        def checkpoint() -> tuple[int, int, int]:
            row = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return row[0], row[1], row[2]

        return self.writer.between(checkpoint).result()

    def back_up(self, target: Path) -> None:
        """A consistent copy, while everything goes on."""
        copy = sqlite3.connect(target)
        try:
            self._read.backup(copy)
        finally:
            copy.close()

    def _move(
        self,
        connection: sqlite3.Connection,
        run: RunRecord,
        state: RunState,
        reason: str,
        *,
        not_before_ms: int = 0,
    ) -> None:
        require_transition(run.run_id, run.state, state)
        now_ms = self._clock_ms()
        connection.execute(
            sql("move"),
            {
                "run_id": run.run_id,
                "state": state.value,
                "reason": reason,
                "now_ms": now_ms,
                "ended_ms": now_ms if state.is_terminal else None,
                "not_before_ms": not_before_ms,
                "change": _next_change(connection),
            },
        )


def _next_change(connection: sqlite3.Connection) -> int:
    return int(connection.execute(sql("next_change")).fetchone()["value"])


def _get(connection: sqlite3.Connection, run_id: str) -> RunRecord:
    row = connection.execute(sql("run"), {"run_id": run_id}).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id!r}")
    return _run(row)


def _attempt_row(connection: sqlite3.Connection, run_id: str, number: int) -> sqlite3.Row:
    row: sqlite3.Row | None = connection.execute(
        sql("attempt"), {"run_id": run_id, "number": number}
    ).fetchone()
    if row is None:
        raise NotFoundError(f"run {run_id} has no attempt {number}")
    return row


def _require_live(connection: sqlite3.Connection, run_id: str, number: int) -> None:
    if _attempt_row(connection, run_id, number)["ended_ms"] is not None:
        raise ConflictError(f"attempt {number} of run {run_id} has ended")


_JSON_COLUMNS = ("config", "metrics", "devices", "needs", "tags")


def _run(row: sqlite3.Row) -> RunRecord:
    return _convert(row, RunRecord)


def _attempt(row: sqlite3.Row) -> AttemptRecord:
    return _convert(row, AttemptRecord)


R = TypeVar("R", RunRecord, AttemptRecord)


def _convert(row: sqlite3.Row, record: type[R]) -> R:
    values = dict(row)
    for name in _JSON_COLUMNS:
        if name in values:
            values[name] = msgspec.json.decode(values[name])
    if "is_cancel_wanted" in values:
        values["is_cancel_wanted"] = bool(values["is_cancel_wanted"])
    try:
        return msgspec.convert(values, record)
    except msgspec.ValidationError as fault:
        raise RegistryError(f"the registry holds a record that is not valid: {fault}") from fault
