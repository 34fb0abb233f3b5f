"""Served names: who has one, what its server said, and what was wanted of it. Inside the caller's transaction.

An event of a server is taken in with its offset, so once; and a server may write an event again after a crash, so each
is taken as what is true from then on. A promotion that has ended stays as it is.
"""

import difflib
import sqlite3
from collections.abc import Mapping
from typing import Any

import msgspec

from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import GateSpec
from gen_worker.contract.serving import (
    FeedbackDueEvent,
    PromotedEvent,
    PromotionRefusedEvent,
    ReadyEvent,
    WantedModel,
)
from trn.core.errors import ConflictError, NotFoundError
from trn.core.runs import RunRecord, RunState
from trn.core.serving.records import (
    DueFeedback,
    Promotion,
    PromotionState,
    ServedModel,
    WantedPromotion,
)
from trn.registry.named_queries import sql
from trn.registry.rows import get_run, next_change

ServerEvent = ReadyEvent | PromotedEvent | PromotionRefusedEvent | FeedbackDueEvent

SERVER_ENDED, NOT_TOLD = "server-ended", "outcome-not-known"
_JSON = ("live", "previous", "second", "version", "gate", "files", "figures")
_encode = msgspec.json.encode


def _text(value: Any) -> str:
    return _encode(value).decode()


def _record(row: sqlite3.Row) -> dict[str, Any]:
    values = dict(zip(row.keys(), row, strict=True))
    for name in _JSON:
        if name in values:
            values[name] = msgspec.json.decode(values[name])
    return values


def read_served(row: sqlite3.Row) -> ServedModel:
    values = _record(row)
    is_ready = values["ready_attempt"] > 0 and values["ready_attempt"] == values.pop("attempt")
    return msgspec.convert({**values, "is_ready": is_ready}, ServedModel)


def read_promotion(row: sqlite3.Row) -> Promotion:
    return msgspec.convert(_record(row), Promotion)


def read_due(row: sqlite3.Row) -> DueFeedback:
    values = _record(row)
    return msgspec.convert({**values, "is_settled": bool(values["is_settled"])}, DueFeedback)


def find_served(connection: sqlite3.Connection, name: str) -> ServedModel:
    """What a person means: the served name, else the id of its server. NotFoundError. What is known to be one of the two
    is looked up as that: a name may be the id of another server."""
    row = _row_as(connection, name) or _row_by(connection, name)
    if row is None:
        served = list_served(connection)
        near = [each.name for each in served if each.run_id.startswith(f"{name}.")]  # of that family
        near = near or difflib.get_close_matches(name, [each.name for each in served], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"`trn serve RUN --name {name}` would serve it"
        raise NotFoundError(f"nothing is served as {name!r}: {hint}")
    return read_served(row)


def find_served_as(connection: sqlite3.Connection, name: str) -> ServedModel:
    """By the served name. NotFoundError."""
    row = _row_as(connection, name)
    if row is None:
        raise NotFoundError(f"nothing is served as {name!r}")
    return read_served(row)


def find_served_by(connection: sqlite3.Connection, run_id: str) -> ServedModel:
    """By the id of the server. NotFoundError, also where another server has its name by now."""
    row = _row_by(connection, run_id)
    if row is None:
        raise NotFoundError(f"run {run_id} serves nothing")
    return read_served(row)


def _row_as(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(sql("served_as"), {"name": name}).fetchone()
    return row


def _row_by(connection: sqlite3.Connection, run_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(sql("served_by"), {"run_id": run_id}).fetchone()
    return row


def list_served(connection: sqlite3.Connection) -> list[ServedModel]:
    return [read_served(row) for row in connection.execute(sql("all_served"))]


def list_promotions(connection: sqlite3.Connection, name: str, limit: int) -> list[Promotion]:
    """The newest first."""
    rows = connection.execute(sql("promotions"), {"name": name, "limit": limit})
    return [read_promotion(row) for row in rows]


def find_promotion(connection: sqlite3.Connection, name: str, number: int) -> Promotion:
    row = connection.execute(sql("promotion"), {"name": name, "number": number}).fetchone()
    if row is None:
        raise NotFoundError(f"{name} has no promotion {number}")
    return read_promotion(row)


def find_wanted(connection: sqlite3.Connection) -> list[tuple[str, WantedModel]]:
    """(server's run, its newest promotion that has not ended), as its server reads it."""
    return [
        (
            row["run_id"],
            WantedModel(
                number=row["number"],
                action=row["action"],
                version=msgspec.json.decode(row["version"], type=ModelVersion | None),
                percent=row["percent"],
                gate=msgspec.json.decode(row["gate_spec"], type=GateSpec),
                by=row["by"],
            ),
        )
        for row in connection.execute(sql("wanted_promotions"))
    ]


def find_versions(
    connection: sqlite3.Connection, name: str
) -> tuple[ModelVersion | None, ModelVersion | None]:
    """(live, previous) of a served name, whole."""
    row = connection.execute(sql("served_as"), {"name": name}).fetchone()
    return _version(row["live"]), _version(row["previous"])


def list_due(connection: sqlite3.Connection) -> list[DueFeedback]:
    """Feedback whose run was not submitted, or whose run has not been seen to its end."""
    return [read_due(row) for row in connection.execute(sql("open_due_feedback"))]


def list_feedback_files(
    connection: sqlite3.Connection, run_id: str, number: int
) -> list[tuple[int, list[str]]]:
    """(rows, files) of each feedback of that server up to this one, the newest last."""
    rows = connection.execute(sql("feedback_files"), {"run_id": run_id, "number": number})
    return [(row["rows"], msgspec.json.decode(row["files"], type=list[str])) for row in rows]


def take_name(connection: sqlite3.Connection, name: str, run: RunRecord) -> None:
    """The run is the name's server from now on. ConflictError where another that lives is."""
    row = _row_as(connection, name)
    if row is not None and not RunState(row["state"]).is_terminal:
        raise ConflictError(f"{name} is served by {row['run_id']}")
    if row is not None:
        connection.execute(sql("give_up_name"), {"name": row["name"]})
    connection.execute(sql("take_name"), {"name": name, "run_id": run.run_id})


def want(connection: sqlite3.Connection, wanted: WantedPromotion, now_ms: int) -> Promotion:
    """Record it as the newest of its name. A repeat with the same `promotion_id` returns the first."""
    made = connection.execute(sql("promotion_by_id"), {"promotion_id": wanted.promotion_id}).fetchone()
    if made is not None:
        return read_promotion(made)
    served = find_served_by(connection, wanted.run_id)
    run = get_run(connection, served.run_id)
    if run.state.is_terminal:
        raise ConflictError(f"{served.name} is not served: {run.run_id} is {run.state.lower()}")
    if run.is_cancel_wanted:
        raise ConflictError(f"{served.name} is being stopped: {run.run_id} is cancelled")
    _check_changes(served, wanted)
    number = int(connection.execute(sql("next_promotion"), {"name": served.name}).fetchone()["number"])
    number = max(number, wanted.after + 1)
    values = {
        "name": served.name,
        "number": number,
        "run_id": run.run_id,
        "action": wanted.action,
        "version": _text(wanted.version),
        "percent": wanted.percent,
        "gate_spec": _text(wanted.gate),
        "by": wanted.by,
        "now_ms": now_ms,
        "promotion_id": wanted.promotion_id,
    }
    connection.execute(sql("add_promotion"), values)
    _note_change(connection, run.run_id, now_ms)
    return find_promotion(connection, served.name, number)


def _check_changes(served: ServedModel, wanted: WantedPromotion) -> None:
    """ConflictError where there is nothing to do. Only of a new promotion: a repeat may find it done."""
    if wanted.action == "promote" and wanted.version is not None and not served.second_is:
        if wanted.version.facts == served.live:
            raise ConflictError(f"{served.name} answers with {wanted.version.label} already")
    elif wanted.action == "rollback" and served.previous is None:
        live = "" if served.live is None else f": {served.live.label} is the first that it answers with"
        raise ConflictError(f"{served.name} has no version to go back to{live}")


def take_event(connection: sqlite3.Connection, run: RunRecord, event: ServerEvent, at_ms: int) -> None:
    """What a server said. Of a run that has no name now, it is ignored."""
    row = _row_by(connection, run.run_id)
    if row is None:
        return
    named = {"name": row["name"], "run_id": run.run_id, "at_ms": at_ms}
    match event:
        case ReadyEvent():
            _take_ready(connection, run, row, event, named)
        case PromotedEvent():
            _take_promoted(connection, row, event, named)
        case PromotionRefusedEvent():
            values = {"cause": event.cause, "words": event.words, "gate": _text(event.gate)}
            _end(connection, {**named, "number": event.number, **values}, PromotionState.REFUSED)
        case FeedbackDueEvent():
            names = ("number", "rows", "files", "reason", "version", "figures")
            values = {name: getattr(event, name) for name in names}
            values |= {name: _text(values[name]) for name in ("files", "version", "figures")}
            connection.execute(sql("add_due_feedback"), {**named, **values})


def end_server(connection: sqlite3.Connection, run_id: str, now_ms: int) -> None:
    """Its run has ended for good: what was still wanted of it is not done any more."""
    words = "the server ended before it was done"
    values = {"run_id": run_id, "at_ms": now_ms, "cause": SERVER_ENDED, "words": words}
    connection.execute(sql("refuse_all"), values)


def _take_ready(
    connection: sqlite3.Connection,
    run: RunRecord,
    row: sqlite3.Row,
    event: ReadyEvent,
    named: Mapping[str, Any],
) -> None:
    values = {"url": event.url, "bearer_file": event.bearer_file, "attempt": run.attempt}
    live = _find_version(connection, run, row, event.version)
    previous = row["previous"] if live == row["live"] else row["live"]
    connection.execute(sql("ready"), {**named, **values, "live": live, "previous": previous})
    # Its own events come first; what is older than what it has finished, and did not end, is not known any more.
    connection.execute(
        sql("refuse_up_to"),
        {
            **named,
            "number": event.number,
            "cause": NOT_TOLD,
            "words": "the server did not say what became of it",
        },
    )


def _find_version(
    connection: sqlite3.Connection, run: RunRecord, row: sqlite3.Row, facts: VersionFacts
) -> str:
    """The whole version that the server names: what answered before, what it was submitted with, or what was wanted."""
    serving = run.config.get("serving")
    known = [row["live"], row["previous"], row["second"], _text((serving or {}).get("version"))]
    known += [item["version"] for item in connection.execute(sql("versions_of"), {"name": row["name"]})]
    return next((text for text in known if _has(text, facts)), _text(facts))


def _has(text: str, facts: VersionFacts) -> bool:
    return msgspec.json.decode(text, type=VersionFacts | None) == facts


def _take_promoted(
    connection: sqlite3.Connection, row: sqlite3.Row, event: PromotedEvent, named: Mapping[str, Any]
) -> None:
    found = connection.execute(sql("promotion"), {"name": named["name"], "number": event.number}).fetchone()
    is_news = found is None or found["state"] == PromotionState.WANTED
    values = {"cause": "", "words": "", "gate": _text(event.gate), "number": event.number}
    before = row["live"] if event.previous is None else _text(event.previous)
    _end(connection, {**named, **values, "previous": before}, PromotionState.DONE)
    if not is_news:
        return
    wanted = _text(event.version) if found is None or found["version"] == "null" else found["version"]
    changed = dict(zip(row.keys(), row, strict=True))
    if event.action in ("promote", "rollback"):
        known = next(
            (row[name] for name in ("live", "previous", "second") if _has(row[name], event.version)), None
        )
        live = wanted if _has(wanted, event.version) else known or _text(event.version)
        if live != row["live"]:
            changed |= {"previous": row["live"]}
        changed |= {"live": live, "second": "null", "second_is": "", "percent": 0.0}
    elif event.action == "single":
        changed |= {"second": "null", "second_is": "", "percent": 0.0}
    else:
        changed |= {"second": wanted, "second_is": event.action, "percent": event.percent}
    names = ("name", "live", "previous", "second", "second_is", "percent")
    connection.execute(sql("answers_now"), {name: changed[name] for name in names})


def _end(connection: sqlite3.Connection, values: Mapping[str, Any], state: PromotionState) -> None:
    """That promotion, and those before it that had not ended: they were replaced by it."""
    connection.execute(sql("end_promotion"), {"previous": None, **values, "state": state.value})
    connection.execute(sql("replace_before"), values)


def _note_change(connection: sqlite3.Connection, run_id: str, now_ms: int) -> None:
    news = {"change": next_change(connection), "now_ms": now_ms}
    connection.execute(sql("note_change"), {"run_id": run_id, **news})


def _version(text: str) -> ModelVersion | None:
    try:
        return msgspec.json.decode(text, type=ModelVersion | None)
    except msgspec.ValidationError:  # only its facts are known
        return None
