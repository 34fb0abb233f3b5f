"""Reads of the registry: for the daemon, and for commands while there is none. They do not wait for writers."""

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.serving import WantedModel
from trn.core.artifacts.records import ArtifactRecord
from trn.core.errors import NotFoundError
from trn.core.runs import AttemptRecord, LineagePart, QueuedRun, RunRecord, RunState
from trn.core.serving.records import DueFeedback, Promotion, ServedModel
from trn.registry.artifacts import find_artifact, find_artifacts, find_unchecked
from trn.registry.connection import Source, open_reader
from trn.registry.families import (
    family_of,
    find_lineage,
    find_run,
    find_submission,
    member_id,
    next_member,
    was_removed,
)
from trn.registry.named_queries import sql
from trn.registry.rows import read_attempt, read_queued, read_run
from trn.registry.serving.served import (
    find_promotion,
    find_served,
    find_served_as,
    find_served_by,
    find_versions,
    find_wanted,
    list_due,
    list_feedback_files,
    list_promotions,
    list_served,
)

MAX_PAGE = 1000
MAX_KINDS = 256  # of needs, that a look at the queue tells apart
# A backoff that began so far in the future began before the clock was set back, and counts as over.
# Not 0: the caller may have read the clock before the writer did.
CLOCK_SLACK_MS = 1000


class RegistryReader:
    """A ReadableRegistry: one read-only connection."""

    def __init__(self, source: Source | sqlite3.Connection) -> None:
        """Of a file, or over a connection that is open: it is closed with this."""
        if isinstance(source, Path) and not source.exists():
            raise NotFoundError(f"there is no registry at {source}: nothing was ever submitted here")
        self._read = source if isinstance(source, sqlite3.Connection) else open_reader(source)

    def close(self) -> None:
        self._read.close()

    def get(self, run_id: str) -> RunRecord:
        return find_run(self._read, run_id, is_exact=True)

    def find(self, text: str, *, is_exact: bool = False) -> RunRecord:
        return find_run(self._read, text, is_exact=is_exact)

    def family_of(self, name: str) -> str:
        return family_of(self._read, name)

    def next_id(self, family: str) -> str:
        return member_id(family, next_member(self._read, family))

    def submission(self, submission_id: str) -> RunRecord | None:
        return find_submission(self._read, submission_id)

    def answers_to(self, digest: str) -> list[RunRecord]:
        return [read_run(row) for row in self._read.execute(sql("answers_to_digest"), {"digest": digest})]

    def lineage(self, run: RunRecord) -> list[LineagePart]:
        return find_lineage(self._read, run)

    def page(
        self,
        *,
        states: Sequence[RunState] = (),
        name: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
        before: tuple[int, str] | None = None,
        limit: int = 100,
        with_config: bool = False,
    ) -> list[RunRecord]:
        before_ms, before_id = before or (1 << 62, "")
        rows = self._read.execute(
            sql("page").replace("run_heads", "runs") if with_config else sql("page"),
            {
                "state_words": f"|{'|'.join(states)}|" if states else "",
                "name": name,
                "tags": msgspec.json.encode(dict(tags)).decode(),
                "num_tags": len(tags),
                "before_ms": before_ms,
                "before_id": before_id,
                "limit": min(max(limit, 1), MAX_PAGE),
            },
        )
        return [read_run(row) for row in rows]

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        return [read_attempt(row) for row in self._read.execute(sql("attempts"), {"run_id": run_id})]

    def artifact(self, artifact_id: str) -> ArtifactRecord:
        return find_artifact(self._read, artifact_id)

    def artifacts(
        self,
        run_id: str,
        *,
        kind: str = "",
        state: str = "",
        before: tuple[int, str] | None = None,
        limit: int = 100,
    ) -> list[ArtifactRecord]:
        return find_artifacts(self._read, run_id, kind=kind, state=state, before=before, limit=limit)

    def unchecked_artifacts(self, run_id: str, limit: int = 100) -> list[ArtifactRecord]:
        return find_unchecked(self._read, run_id, limit)

    def present_files(self, run_id: str, kind: str = "") -> list[tuple[str, str, str]]:
        rows = self._read.execute(sql("present_files"), {"run_id": run_id, "kind": kind})
        return [(row["artifact_id"], row["kind"], row["path"]) for row in rows]

    def runs_with_unchecked_artifacts(self) -> list[str]:
        return [row["run_id"] for row in self._read.execute(sql("runs_with_unchecked_artifacts"))]

    def queue(self, now_ms: int, limit: int, *, without: Sequence[str] = ()) -> list[QueuedRun]:
        kinds = [row["needs"] for row in self._read.execute(sql("kinds_in_queue"), {"limit": MAX_KINDS})]
        when = {
            "now_ms": now_ms,
            "slack_ms": CLOCK_SLACK_MS,
            "limit": limit,
            "without": msgspec.json.encode(without).decode(),
        }
        found = [
            read_queued(row)
            for needs in kinds
            for row in self._read.execute(sql("queue"), {**when, "needs": needs})
        ]
        found.sort(key=lambda run: (-run.priority, run.submitted_ms, run.run_id))
        return found

    def next_backoff_ms(self, now_ms: int) -> int | None:
        values = {"now_ms": now_ms, "slack_ms": CLOCK_SLACK_MS}
        at_ms = self._read.execute(sql("next_backoff"), values).fetchone()["at_ms"]
        return None if at_ms is None else int(at_ms)

    def event_place(self, run_id: str, seq: int) -> tuple[int, int]:
        row = self._read.execute(sql("event_place"), {"run_id": run_id, "seq": seq}).fetchone()
        return (0, 0) if row is None else (row["seq"], row["offset"])

    def live(self) -> list[RunRecord]:
        return [read_run(row) for row in self._read.execute(sql("live"))]

    def ended_before(self, before_ms: int) -> list[RunRecord]:
        return [read_run(row) for row in self._read.execute(sql("ended_before"), {"before_ms": before_ms})]

    def children(self, run_ids: Sequence[str]) -> list[tuple[str, str]]:
        rows = self._read.execute(sql("children"), {"run_ids": msgspec.json.encode(list(run_ids)).decode()})
        return [(row["run_id"], row["parent_run_id"]) for row in rows]

    def has(self, run_id: str) -> bool:
        return self._read.execute(sql("has_run"), {"run_id": run_id}).fetchone() is not None

    def unknown_ids(self, run_ids: Sequence[str]) -> list[str]:
        wanted = {"run_ids": msgspec.json.encode(list(run_ids)).decode()}
        return [row["run_id"] for row in self._read.execute(sql("unknown_ids"), wanted)]

    def was_removed(self, run_id: str) -> bool:
        return was_removed(self._read, run_id)

    def resume_paths(self) -> list[str]:
        return [row["path"] for row in self._read.execute(sql("resume_paths"))]

    def unfinished_configs(self) -> dict[str, str]:
        return {row["run_id"]: row["config"] for row in self._read.execute(sql("unfinished_configs"))}

    def not_told(self, run_id: str, consumers: Sequence[str]) -> list[str]:
        values = {"run_id": run_id, "consumers": msgspec.json.encode(list(consumers)).decode()}
        return [row["consumer"] for row in self._read.execute(sql("not_told"), values)]

    def has_unfinished(self) -> bool:
        return self._read.execute(sql("has_unfinished")).fetchone() is not None

    def snapshots(self, *, without: Sequence[str] = ()) -> set[str]:
        values = {"run_ids": msgspec.json.encode(list(without)).decode()}
        return {row["snapshot"] for row in self._read.execute(sql("snapshots"), values)}

    def changed(self, after: int, limit: int = 500) -> list[RunRecord]:
        return [read_run(row) for row in self._read.execute(sql("changed"), {"after": after, "limit": limit})]

    def last_change(self) -> int:
        return int(self._read.execute(sql("last_change")).fetchone()["value"])

    def removed(self, after: int, limit: int = 500) -> list[tuple[str, int]]:
        """(run, change) of those that were removed after that change, in the order of the changes."""
        rows = self._read.execute(sql("removed_after"), {"after": after, "limit": limit})
        return [(row["run_id"], row["change"]) for row in rows]

    def members(self, family: str) -> list[str]:
        """The runs of a family, the oldest first."""
        return [row["run_id"] for row in self._read.execute(sql("members"), {"family": family})]

    def attempts_between(self, from_ms: int, to_ms: int, limit: int) -> list[AttemptRecord]:
        """Attempts that lived then, of all runs, the newest `limit` of them, by their start."""
        between = {"from_ms": from_ms, "to_ms": to_ms, "limit": limit}
        return [read_attempt(row) for row in self._read.execute(sql("attempts_between"), between)][::-1]

    def past_speeds(self, trainer: str, limit: int) -> list[float]:
        """Seconds per step of the newest completed runs of that trainer class."""
        wanted = {"trainer": trainer, "limit": limit}
        return [row["step_s"] for row in self._read.execute(sql("past_speeds"), wanted)]

    def trainers(self, run_ids: Sequence[str]) -> dict[str, str]:
        """The trainer class that each of these runs names; empty where its job names none."""
        wanted = {"run_ids": msgspec.json.encode(list(run_ids)).decode()}
        return {row["run_id"]: row["trainer"] for row in self._read.execute(sql("trainers"), wanted)}

    def counts(self) -> dict[str, int]:
        return {row["state"]: row["num"] for row in self._read.execute(sql("counts"))}

    def slots(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._read.execute(sql("slots"))]

    def holdings(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._read.execute(sql("holdings"))]

    def num_ahead(self, run: RunRecord, now_ms: int) -> int:
        values = {"priority": run.priority, "submitted_ms": run.submitted_ms, "run_id": run.run_id}
        return int(self._read.execute(sql("num_ahead"), {**values, "now_ms": now_ms}).fetchone()["num"])

    def held(self) -> tuple[int, int]:
        row = self._read.execute(sql("held")).fetchone()
        return int(row["cpus"]), int(row["memory_mb"])

    def served(self, name: str) -> ServedModel:
        return find_served(self._read, name)

    def served_as(self, name: str) -> ServedModel:
        return find_served_as(self._read, name)

    def served_by(self, run_id: str) -> ServedModel:
        return find_served_by(self._read, run_id)

    def all_served(self) -> list[ServedModel]:
        return list_served(self._read)

    def versions_of(self, name: str) -> tuple[ModelVersion | None, ModelVersion | None]:
        return find_versions(self._read, name)

    def promotions(self, name: str, limit: int = 100) -> list[Promotion]:
        return list_promotions(self._read, name, limit)

    def promotion(self, name: str, number: int) -> Promotion:
        return find_promotion(self._read, name, number)

    def wanted(self) -> list[tuple[str, WantedModel]]:
        return find_wanted(self._read)

    def due_feedback(self) -> list[DueFeedback]:
        return list_due(self._read)

    def feedback_files(self, run_id: str, number: int) -> list[tuple[int, list[str]]]:
        return list_feedback_files(self._read, run_id, number)

    def models_in_use(self) -> list[str]:
        return [
            *(row["config"] for row in self._read.execute(sql("inference_configs"))),
            *(row["version"] for row in self._read.execute(sql("promoted_versions"))),
        ]
