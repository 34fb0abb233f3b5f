"""RunRegistry on SQLite. Changes go through one writer and are durable when their future is done.

Every change of a run's state passes `_move`, which asks the transition table; slots are taken and freed in the same
transaction as the state that says so.
"""

import itertools
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from trn.core.artifacts.records import CheckedFile, NamedFile
from trn.core.causes import Cause
from trn.core.errors import ConflictError
from trn.core.number_words import with_words
from trn.core.runs import SERVER, AttemptRecord, RunRecord, RunState, require_transition
from trn.core.serving.records import DueFeedback, Promotion, WantedPromotion
from trn.registry.artifacts import add_named, settle
from trn.registry.base import Ending, NewRun
from trn.registry.connection import (
    OpenFile,
    checkpoint_file,
    copy_to,
    memory_source,
    migrate,
    open_writer,
)
from trn.registry.cursors import BusCancels, LogPlaces, OutboxTable
from trn.registry.named_queries import sql
from trn.registry.reader import RegistryReader
from trn.registry.rows import attempt_row, get_run, next_change, read_attempt, require_live
from trn.registry.serving.served import ServerEvent, end_server, take_event, want
from trn.registry.submissions import add_submission
from trn.registry.writer import Change, RegistryWriter

PLACE_EVERY_BYTES = 256 << 10
MAX_NAMES = 1000  # of metrics, in a run's record; the metric store has all

_encode = msgspec.json.encode

# What names a run goes before the run itself.
_REMOVALS = (
    "remove_served",
    "remove_promotions",
    "remove_due_feedback",
    "remove_artifacts",
    "remove_attempts",
    "remove_event_places",
    "remove_outbox_places",
    "remove_log_places",
    "remove_run",
)


class RunRegistry(RegistryReader):
    """A `Registry`: the contract of its methods is there. One for a home, in one process."""

    def __init__(
        self, path: Path | None, *, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    ) -> None:
        """`path` None: in memory, for tests: what it holds is gone with it."""
        self._source = memory_source() if path is None else path
        connection = open_writer(self._source)
        try:
            migrate(connection, "trn.registry.migrations")
        except BaseException:
            connection.close()
            raise
        self._clock_ms = clock_ms
        self._connection = connection
        self._file = None if path is None else OpenFile(path, is_changed_by_checkpoints_alone=True)
        self.writer = RegistryWriter(connection, file=self._file)
        super().__init__(self._source)

    def close(self) -> None:
        super().close()
        self.writer.close()  # the last one out brings the log back into the file

    def reader(self) -> RegistryReader:
        return RegistryReader(self._source)

    def outbox(self, consumer: str) -> OutboxTable:
        return OutboxTable(self._source, self.writer, consumer)

    def log_places(self) -> LogPlaces:
        return LogPlaces(self._source, self.writer)

    def bus_cancels(self) -> BusCancels:
        return BusCancels(self._source, self.writer)

    async def settled(self) -> None:
        await self.writer.settled()

    def submit(
        self,
        new: NewRun,
        *,
        force_new: bool = False,
        stale: Collection[str] = (),
        draw_id: Callable[[], str] | None = None,
    ) -> "Future[tuple[RunRecord, bool]]":
        change, is_one_write = self._submission(new, force_new=force_new, stale=stale, draw_id=draw_id)
        return self.writer.submit(change, is_one_write=is_one_write)

    async def add(
        self,
        new: NewRun,
        *,
        force_new: bool = False,
        stale: Collection[str] = (),
        draw_id: Callable[[], str] | None = None,
    ) -> tuple[RunRecord, bool]:
        change, is_one_write = self._submission(new, force_new=force_new, stale=stale, draw_id=draw_id)
        return await self.writer.apply(change, is_one_write=is_one_write)

    def _submission(self, new: NewRun, **rules: Any) -> tuple[Change[tuple[RunRecord, bool]], bool]:
        def change(connection: sqlite3.Connection) -> tuple[RunRecord, bool]:
            return add_submission(connection, new, now_ms=self._clock_ms(), **rules)

        return change, not new.served_name  # a row of its own; of a server also its name

    def want_cancel(self, run_id: str, reason: str) -> "Future[tuple[RunRecord, bool]]":
        def change(connection: sqlite3.Connection) -> tuple[RunRecord, bool]:
            run = get_run(connection, run_id)
            if run.state.is_terminal:
                return run, False
            cause = _encode(Cause(id="cancelling", values={"asked": reason, "attempt": run.attempt})).decode()
            values = {"run_id": run_id, "reason": reason, "cause": cause, "now_ms": self._clock_ms()}
            connection.execute(sql("want_cancel"), {**values, "change": next_change(connection)})
            if run.state is RunState.PENDING:
                self._move(connection, run, RunState.CANCELLED, _cancelled(reason, run.attempt))
            return get_run(connection, run_id), True

        return self.writer.submit(change)

    def set_labels(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Mapping[str, str] = MappingProxyType({}),
        removed_tags: Sequence[str] = (),
    ) -> "Future[RunRecord]":
        def change(connection: sqlite3.Connection) -> RunRecord:
            run = get_run(connection, run_id)
            new = {name: value for name, value in {**run.tags, **tags}.items() if name not in removed_tags}
            title = run.name if name is None else name
            text = run.notes if notes is None else notes
            if (title, text, new) != (run.name, run.notes, run.tags):
                values = {"run_id": run_id, "name": title, "notes": text, "tags": _encode(new).decode()}
                connection.execute(sql("set_labels"), {**values, "change": next_change(connection)})
            return get_run(connection, run_id)

        return self.writer.submit(change)

    def claim(self, run_id: str, device_ids: Sequence[str]) -> "Future[AttemptRecord]":
        def change(connection: sqlite3.Connection) -> AttemptRecord:
            run = get_run(connection, run_id)
            if run.is_cancel_wanted:
                raise ConflictError(f"run {run_id} is being cancelled")
            number, now_ms = run.attempt + 1, self._clock_ms()
            self._move(
                connection, run, RunState.DISPATCHING, Cause(id="launching", values={"attempt": number})
            )
            held = {"run_id": run_id, "attempt": number}
            for device_id in device_ids:
                taken = connection.execute(
                    sql("take_slot"), {**held, "device_id": device_id, "now_ms": now_ms}
                )
                if taken.rowcount != 1:
                    raise ConflictError(f"the slot {device_id} is not free any more")
            if run.needs.is_local:
                needs = {"cpus": run.needs.cpus, "memory_mb": run.needs.memory_mb}
                connection.execute(sql("hold"), {**held, **needs})
            devices = _encode(list(device_ids)).decode()
            connection.execute(sql("hold_run"), {**held, "devices": devices})
            connection.execute(
                sql("add_attempt"), {"run_id": run_id, "number": number, "now_ms": now_ms, "devices": devices}
            )
            return read_attempt(attempt_row(connection, run_id, number))

        return self.writer.submit(change)

    def launched(self, run_id: str, number: int, *, worker: str, pid: int = 0) -> "Future[RunRecord]":
        def change(connection: sqlite3.Connection) -> RunRecord:
            require_live(connection, run_id, number)
            named = {"worker": worker, "pid": pid, "now_ms": self._clock_ms()}
            connection.execute(sql("launched"), {"run_id": run_id, "number": number, **named})
            run = get_run(connection, run_id)
            if run.state is RunState.DISPATCHING:
                running = Cause(
                    id="running",
                    values={"attempt": number, "pid": pid} if pid else {"attempt": number, "worker": worker},
                )
                self._move(connection, run, RunState.RUNNING, run.cause if run.is_cancel_wanted else running)
            return get_run(connection, run_id)

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
        start_step: int | None = None,
        end_step: int | None = None,
        named_files: Sequence[NamedFile] = (),
        server_events: Sequence[tuple[int, ServerEvent]] = (),
    ) -> "Future[RunRecord]":
        def change(connection: sqlite3.Connection) -> RunRecord:
            run = get_run(connection, run_id)
            if offset <= run.event_offset or last_seq < run.last_seq:
                return run  # an ingest that was repeated after a lost reply
            attempt = {"run_id": run_id, "number": number, "step": step, "heartbeat_ms": heartbeat_ms}
            connection.execute(sql("follow"), attempt)
            place = {"run_id": run_id, "seq": last_seq, "offset": offset}
            newest = connection.execute(sql("newest_place"), {"run_id": run_id}).fetchone()
            if offset - (0 if newest is None else newest["offset"]) >= PLACE_EVERY_BYTES:
                connection.execute(sql("add_place"), place)
            connection.execute(
                sql("progress"),
                {
                    "run_id": run_id,
                    "offset": offset,
                    "step": step,
                    "start_step": start_step,
                    "end_step": end_step,
                    "last_seq": last_seq,
                    "metrics": _encode(with_words(_newest(run.metrics, metrics))).decode(),
                    "now_ms": self._clock_ms(),
                    "change": next_change(connection),
                },
            )
            add_named(connection, run_id, named_files)
            for at_ms, event in server_events:
                take_event(connection, run, event, at_ms)
            return get_run(connection, run_id)

        return self.writer.submit(change)

    def settle_artifacts(
        self, run_id: str, checked: Sequence[CheckedFile] = (), gone: Sequence[str] = ()
    ) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            if settle(connection, run_id, checked, gone):
                news = {"change": next_change(connection), "now_ms": self._clock_ms()}
                connection.execute(sql("note_change"), {"run_id": run_id, **news})

        return self.writer.submit(change)

    def want_promotion(self, wanted: WantedPromotion) -> "Future[Promotion]":
        return self.writer.submit(lambda connection: want(connection, wanted, self._clock_ms()))

    def settle_feedback(self, due: DueFeedback) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            names = ("run_id", "number", "child", "fault", "is_settled")
            connection.execute(sql("settle_due_feedback"), {name: getattr(due, name) for name in names})

        return self.writer.submit(change)

    def rewind(self, run_id: str, offset: int) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            place = {"run_id": run_id, "offset": offset}
            connection.execute(sql("rewind"), place)
            connection.execute(sql("forget_places_after"), place)

        return self.writer.submit(change)

    def set_cause(self, run_id: str, cause: Cause) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            run = get_run(connection, run_id)
            if run.state is RunState.PENDING and run.cause != cause:
                values = {"run_id": run_id, "cause": _encode(cause).decode(), "now_ms": self._clock_ms()}
                connection.execute(sql("set_cause"), {**values, "change": next_change(connection)})

        return self.writer.submit(change)

    def end(self, run_id: str, number: int, ending: Ending) -> "Future[RunRecord]":
        """End an attempt: its slots are freed and the run moves on, in one transaction. Safe to repeat.

        The next attempt's time counts from this end, by the same look at the clock: where the clock was put back between
        a decision and its record, the run would wait until the clock is there again.
        """

        def change(connection: sqlite3.Connection) -> RunRecord:
            now_ms, cause = self._clock_ms(), ending.cause
            if ending.state is RunState.PENDING:
                cause = replace(cause, next_attempt_ms=now_ms + ending.delay_ms)
            ended = connection.execute(
                sql("end_attempt"),
                {
                    "run_id": run_id,
                    "number": number,
                    "now_ms": now_ms,
                    "exit_code": ending.exit_code,
                    "category": ending.category,
                    "cause": _encode(cause).decode(),
                    "saved_step": ending.saved_step,
                },
            )
            run = get_run(connection, run_id)
            if ended.rowcount == 0:
                return run  # it was ended before: slots are freed exactly once
            held = {"run_id": run_id, "attempt": number}
            connection.execute(sql("free_slots"), held)
            connection.execute(sql("let_go"), held)
            if ending.is_interruption:
                connection.execute(sql("interrupted"), {"run_id": run_id})
            if ending.stop_reason:
                connection.execute(
                    sql("stopped_early"), {"run_id": run_id, "stop_reason": ending.stop_reason}
                )
            state = ending.state
            if state is RunState.PENDING and run.is_cancel_wanted:  # asked for while it was decided
                state, cause = RunState.CANCELLED, _cancelled(run.cancel_reason, run.attempt)
            not_before_ms = cause.next_attempt_ms if state is RunState.PENDING else 0
            self._move(connection, run, state, cause, now_ms=now_ms, not_before_ms=not_before_ms)
            return get_run(connection, run_id)

        return self.writer.submit(change)

    def set_slots(self, device_ids: Sequence[str]) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            for device_id in device_ids:
                connection.execute(sql("add_slot"), {"device_id": device_id})

        return self.writer.submit(change)

    def quarantine(self, device_id: str, reason: str) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            connection.execute(sql("quarantine"), {"device_id": device_id, "reason": reason})

        return self.writer.submit(change)

    def remove(self, run_ids: Sequence[str]) -> "Future[None]":
        def change(connection: sqlite3.Connection) -> None:
            runs = [get_run(connection, run_id) for run_id in run_ids]
            for run in runs:
                if not run.state.is_terminal:
                    raise ConflictError(f"run {run.run_id} is {run.state}: cancel it first")
            wanted = {"run_ids": _encode(list(run_ids)).decode()}
            for row in connection.execute(sql("children"), wanted):
                raise ConflictError(
                    f"run {row['run_id']} began from {row['parent_run_id']}: remove it as well"
                )
            for run in runs:
                for query in _REMOVALS:
                    connection.execute(sql(query), {"run_id": run.run_id})
                named = {"run_id": run.run_id, "family": run.family, "member": run.member}
                change = next_change(connection)
                connection.execute(sql("removed"), {**named, "now_ms": self._clock_ms(), "change": change})
                connection.execute(sql("keep_change"), {"change": change})

        return self.writer.submit(change)

    def checkpoint_wal(self) -> tuple[int, int, int]:
        """(busy, frames in the log, frames checkpointed), as SQLite says."""

        file = self._file
        if file is None:
            return 0, 0, 0
        return self.writer.between(lambda: checkpoint_file(self._connection, file)).result()

    def find_problem(self) -> str:
        """Why nothing can be written any more; empty: all is well. Blocks for what is being written."""
        return "" if self._file is None else self.writer.between(self._file.find_problem).result()

    def rescue(self, target: Path) -> None:
        """A copy of what this process has, also where its file was deleted. Blocks."""
        self.writer.between(lambda: copy_to(self._connection, target)).result()

    def _move(
        self,
        connection: sqlite3.Connection,
        run: RunRecord,
        state: RunState,
        cause: Cause,
        *,
        now_ms: int | None = None,
        not_before_ms: int = 0,
    ) -> None:
        require_transition(run.run_id, run.state, state)
        now_ms = self._clock_ms() if now_ms is None else now_ms
        if state.is_terminal and run.kind == SERVER:
            end_server(connection, run.run_id, now_ms)
        connection.execute(
            sql("move"),
            {
                "run_id": run.run_id,
                "state": state.value,
                "cause": _encode(cause).decode(),
                "now_ms": now_ms,
                "ended_ms": now_ms if state.is_terminal else None,
                "not_before_ms": not_before_ms,
                "change": next_change(connection),
            },
        )


def _cancelled(asked: str, attempt: int) -> Cause:
    return Cause(id="cancelled", values={"asked": asked, "stage": "" if attempt else "not-started"})


def _newest(known: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, float]:
    """The newest value of each name; of names without end, those that came first."""
    return dict(itertools.islice({**known, **fresh}.items(), MAX_NAMES))
