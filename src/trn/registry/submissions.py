"""A submission -> its run: a new one of its family, or the one that answers. Inside the writer's transaction."""

import sqlite3
from collections.abc import Callable, Collection

import msgspec

from trn.core.causes import QUEUED
from trn.core.errors import ConflictError
from trn.core.runs import RunOptions, RunRecord, RunState
from trn.registry.base import NewRun
from trn.registry.families import family_of, find_submission, member_id, next_member
from trn.registry.named_queries import sql
from trn.registry.rows import next_change, read_run
from trn.registry.serving.served import take_name

_encode = msgspec.json.Encoder().encode

# Options whose column is from before there was `options`, or that a query asks for.
_COLUMNS = {
    "priority",
    "snapshot",
    "frozen_from",
    "base_dir",
    "interpreter",
    "log_dir",
    "event_log",
    "submission_id",
}
_COLUMNS |= {"parent_run_id", "start_step"}
_OPTIONS = [name for name in RunOptions.__struct_fields__ if name not in _COLUMNS]
_JSON_COLUMNS = ("config", "needs", "tags", "secret_env")
_QUEUED = _encode(QUEUED).decode()


def add_submission(
    connection: sqlite3.Connection,
    new: NewRun,
    *,
    force_new: bool,
    stale: Collection[str],
    draw_id: Callable[[], str] | None = None,
    now_ms: int,
) -> tuple[RunRecord, bool]:
    """(the run, whether an equal one answers). Only a live or complete run answers, and none of `stale`.

    Two statements where nothing is equal and the id is free; everything else is looked up only then.
    """
    if not force_new and not _may_answer(connection, new):
        added = _add(connection, new, member=1, now_ms=now_ms)
        if added is not None:
            return added, False
    made = find_submission(connection, new.submission_id)
    if made is not None:
        _require_same(new, made)
        return made, False
    if not force_new:
        for row in connection.execute(sql("answers_to_digest"), {"digest": new.digest}):
            if row["run_id"] not in stale:
                return read_run(row), True
    while draw_id is not None and family_of(connection, new.run_id):
        new = msgspec.structs.replace(new, run_id=draw_id())
    member = next_member(connection, new.run_id)
    added = _add(connection, new, member=member, now_ms=now_ms)
    assert added is not None, "there is one writer"
    return added, False


def _may_answer(connection: sqlite3.Connection, new: NewRun) -> bool:
    """Is there an equal run, this very submission, or a further run of the family? Apart from the insert: one that
    reads its own table makes a table in memory first.
    """
    asked = {"digest": new.digest, "submission_id": new.submission_id, "family": new.run_id}
    return bool(connection.execute(sql("may_answer"), asked).fetchone()[0])


def _add(connection: sqlite3.Connection, new: NewRun, *, member: int, now_ms: int) -> RunRecord | None:
    """The run, queued; None where there is a run of that id."""
    values = msgspec.structs.asdict(new)
    name = values.pop("served_name")
    values["run_id"] = run_id = member_id(new.run_id, member)
    values["config"] = {**new.config, "run_id": run_id}
    values["family"], values["member"] = new.run_id, member
    values["submitted_ms"] = values["updated_ms"] = now_ms
    values["change"] = next_change(connection)
    values["state"], values["cause"] = RunState.PENDING, QUEUED
    run = RunRecord(**values)
    values["cause"] = _QUEUED
    for column in _JSON_COLUMNS:
        values[column] = _encode(values[column]).decode()
    options = {name: values[name] for name in _OPTIONS}
    values["options"] = _encode(options).decode() if options else "{}"
    if connection.execute(sql("add_run"), values).rowcount != 1:
        return None
    if name:
        take_name(connection, name, run)
    return run


def _require_same(new: NewRun, made: RunRecord) -> None:
    """ConflictError where one submission_id came with two different jobs."""
    is_same = (new.snapshot, new.base_dir, new.parent_run_id) == (
        made.snapshot,
        made.base_dir,
        made.parent_run_id,
    ) and {**new.config, "run_id": ""} == {**made.config, "run_id": ""}
    if not is_same:
        raise ConflictError(
            f"the submission_id {new.submission_id!r} made run {made.run_id}, which is another job: draw a new one for"
            " each submit"
        )
