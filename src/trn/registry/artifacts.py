"""Artifacts in the registry. An event and the rows of the files that it names are one transaction.

A row is made once, by its id, which the event determines. So a crash between the file and the registry loses nothing: the
event is still in the run's file, or the row waits to be checked. Reading an event again adds nothing.
"""

import sqlite3
from collections.abc import Sequence

import msgspec

from trn.core.artifacts.records import (
    ArtifactRecord,
    ArtifactState,
    CheckedFile,
    NamedFile,
    media_type_of,
    name_of,
)
from trn.core.errors import NotFoundError
from trn.registry.named_queries import sql
from trn.registry.rows import read_artifact

MAX_PAGE = 1000


def add_named(connection: sqlite3.Connection, run_id: str, named: Sequence[NamedFile]) -> None:
    for file in named:
        row = {**msgspec.structs.asdict(file), "size_bytes": file.size_bytes or 0, "run_id": run_id}
        shown = {"name": name_of(file.path), "media_type": media_type_of(file.path)}
        connection.execute(sql("add_artifact"), {**row, **shown})


def settle(
    connection: sqlite3.Connection, run_id: str, checked: Sequence[CheckedFile], gone: Sequence[str]
) -> bool:
    """Record what was found, in the order of the events, and which present files are gone. False: nothing is new."""
    num_changed = 0
    lost = list(gone)
    for file in checked:
        named = {"run_id": run_id, "artifact_id": file.artifact_id}
        found = {**msgspec.structs.asdict(file), "cause": msgspec.json.encode(file.cause).decode()}
        if connection.execute(sql("settle_artifact"), {**found, **named}).rowcount != 1:
            continue  # the run was removed
        num_changed += 1
        if file.state is ArtifactState.PRESENT:
            connection.execute(sql("supersede_artifacts"), {**named, "path": file.path})
        else:
            lost.append(file.artifact_id)
    if gone:
        ids = {"run_id": run_id, "artifact_ids": msgspec.json.encode(gone).decode()}
        num_changed += connection.execute(sql("artifacts_are_gone"), ids).rowcount
    if lost:
        ids = {"run_id": run_id, "artifact_ids": msgspec.json.encode(lost).decode()}
        connection.execute(sql("forget_posters"), ids)
    if num_changed:
        connection.execute(sql("summarize_artifacts"), {"run_id": run_id})
    return num_changed > 0


def find_artifact(connection: sqlite3.Connection, artifact_id: str) -> ArtifactRecord:
    row = connection.execute(sql("artifact"), {"artifact_id": artifact_id}).fetchone()
    if row is None:
        raise NotFoundError(f"there is no artifact {artifact_id[:60]!r}")
    return read_artifact(row)


def find_artifacts(
    connection: sqlite3.Connection,
    run_id: str,
    *,
    kind: str,
    state: str,
    before: tuple[int, str] | None,
    limit: int,
) -> list[ArtifactRecord]:
    before_seq, before_id = before or (1 << 62, "")
    wanted = {"run_id": run_id, "kind": kind, "state": state, "limit": min(max(limit, 1), MAX_PAGE)}
    place = {"before_seq": before_seq, "before_id": before_id}
    return [read_artifact(row) for row in connection.execute(sql("artifacts"), {**wanted, **place})]


def find_unchecked(connection: sqlite3.Connection, run_id: str, limit: int) -> list[ArtifactRecord]:
    rows = connection.execute(sql("unchecked_artifacts"), {"run_id": run_id, "limit": limit})
    return [read_artifact(row) for row in rows]
