"""Reads of the registry: for the daemon, and for commands while there is none. They wait for nobody."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from trn.core.errors import NotFoundError
from trn.core.runs import AttemptRecord, LineagePart, QueuedRun, RunRecord, RunState
from trn.registry.connection import open_reader
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

MAX_PAGE = 1000
MAX_KINDS = 256  # of needs, that a look at the queue tells apart
# A backoff that began so far in the future began before the clock was put back: nobody knows when it is over, so it is.
# Not 0: who asks may have looked at the clock before the writer did.
CLOCK_SLACK_MS = 1000


class RegistryReader:
    """One read-only connection. Not for several threads at once."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise NotFoundError(f"there is no registry at {path}: nothing was ever submitted here")
        self._read = open_reader(path)

    def close(self) -> None:
        self._read.close()

    def get(self, run_id: str) -> RunRecord:
        """By its id, exactly. NotFoundError."""
        return find_run(self._read, run_id, is_exact=True)

    def find(self, text: str, *, is_exact: bool = False) -> RunRecord:
        """By what a person or a program calls it: see `trn.registry.families`. NotFoundError, AmbiguousError."""
        return find_run(self._read, text, is_exact=is_exact)

    def family_of(self, name: str) -> str:
        """The family of the run with that id; empty where there is none."""
        return family_of(self._read, name)

    def next_id(self, family: str) -> str:
        """The id that the next run of a family would get."""
        return member_id(family, next_member(self._read, family))

    def submission(self, submission_id: str) -> RunRecord | None:
        """The run that this submission made."""
        return find_submission(self._read, submission_id)

    def answers_to(self, digest: str) -> list[RunRecord]:
        """Runs that ask for the same and are alive or complete, the newest first. One that is to be cancelled is not
        among them."""
        return [read_run(row) for row in self._read.execute(sql("answers_to_digest"), {"digest": digest})]

    def lineage(self, run: RunRecord) -> list[LineagePart]:
        """Its line of descent, the oldest first, as one curve."""
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
        """The newest first, with all of `tags`; `before` is (submitted_ms, run_id) of the last one of the page before."""
        before_ms, before_id = before or (1 << 62, "")
        rows = self._read.execute(
            sql("page_with_config" if with_config else "page"),
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

    def queue(self, now_ms: int, limit: int, *, without: Sequence[str] = ()) -> list[QueuedRun]:
        """Pending runs whose backoff is over, in the order in which they are to start: of each kind of needs the first
        `limit`. Where the first of a kind cannot start, none of that kind can; so no kind hides another. Runs of the
        interpreters `without` are passed over.
        """
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
        """When the next backoff is over."""
        values = {"now_ms": now_ms, "slack_ms": CLOCK_SLACK_MS}
        at_ms = self._read.execute(sql("next_backoff"), values).fetchone()["at_ms"]
        return None if at_ms is None else int(at_ms)

    def event_place(self, run_id: str, seq: int) -> tuple[int, int]:
        """(seq, offset): up to that offset of the run's file lie its events up to that seq, which is at most `seq`."""
        row = self._read.execute(sql("event_place"), {"run_id": run_id, "seq": seq}).fetchone()
        return (0, 0) if row is None else (row["seq"], row["offset"])

    def live(self) -> list[RunRecord]:
        return [read_run(row) for row in self._read.execute(sql("live"))]

    def ended_before(self, before_ms: int) -> list[RunRecord]:
        """Runs that ended before then, the oldest first; with their configs."""
        return [read_run(row) for row in self._read.execute(sql("ended_before"), {"before_ms": before_ms})]

    def children(self, run_ids: Sequence[str]) -> list[tuple[str, str]]:
        """(run, the one of `run_ids` that it began from), of runs that are not among them."""
        rows = self._read.execute(sql("children"), {"run_ids": msgspec.json.encode(list(run_ids)).decode()})
        return [(row["run_id"], row["parent_run_id"]) for row in rows]

    def has(self, run_id: str) -> bool:
        """Whether there is a run of that very id."""
        return self._read.execute(sql("has_run"), {"run_id": run_id}).fetchone() is not None

    def unknown_ids(self, run_ids: Sequence[str]) -> list[str]:
        """Those of them that no run has, in their order."""
        wanted = {"run_ids": msgspec.json.encode(list(run_ids)).decode()}
        return [row["run_id"] for row in self._read.execute(sql("unknown_ids"), wanted)]

    def was_removed(self, run_id: str) -> bool:
        """Whether there was a run of that very id, which somebody removed."""
        return was_removed(self._read, run_id)

    def resume_paths(self) -> list[str]:
        """The checkpoints that runs began from, as their jobs name them."""
        return [row["path"] for row in self._read.execute(sql("resume_paths"))]

    def unfinished_configs(self) -> dict[str, str]:
        """What runs ask for that wait or run, as JSON texts."""
        return {row["run_id"]: row["config"] for row in self._read.execute(sql("unfinished_configs"))}

    def not_told(self, run_id: str, consumers: Sequence[str]) -> list[str]:
        """Which of these consumers have not got all of the run's news yet."""
        values = {"run_id": run_id, "consumers": msgspec.json.encode(list(consumers)).decode()}
        return [row["consumer"] for row in self._read.execute(sql("not_told"), values)]

    def has_unfinished(self) -> bool:
        """Whether any run still waits or runs."""
        return self._read.execute(sql("has_unfinished")).fetchone() is not None

    def snapshots(self, *, without: Sequence[str] = ()) -> set[str]:
        """The code snapshots that runs name; `without`: other runs than these."""
        values = {"run_ids": msgspec.json.encode(list(without)).decode()}
        return {row["snapshot"] for row in self._read.execute(sql("snapshots"), values)}

    def changed(self, after: int, limit: int = 500) -> list[RunRecord]:
        """Runs whose last change is after that one, in the order of the changes."""
        return [read_run(row) for row in self._read.execute(sql("changed"), {"after": after, "limit": limit})]

    def last_change(self) -> int:
        return int(self._read.execute(sql("last_change")).fetchone()["value"])

    def counts(self) -> dict[str, int]:
        return {row["state"]: row["num"] for row in self._read.execute(sql("counts"))}

    def slots(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self._read.execute(sql("slots"))]

    def holdings(self) -> list[dict[str, Any]]:
        """The CPUs and the memory of each run that lives."""
        return [dict(row) for row in self._read.execute(sql("holdings"))]

    def num_ahead(self, run: RunRecord, now_ms: int) -> int:
        """How many runs wait that are to start before it. Reads all that wait."""
        values = {"priority": run.priority, "submitted_ms": run.submitted_ms, "run_id": run.run_id}
        return int(self._read.execute(sql("num_ahead"), {**values, "now_ms": now_ms}).fetchone()["num"])

    def held(self) -> tuple[int, int]:
        """(cpus, memory_mb) that live attempts hold."""
        row = self._read.execute(sql("held")).fetchone()
        return int(row["cpus"]), int(row["memory_mb"])
