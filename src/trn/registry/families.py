"""Which run is meant by a name, and what its line of descent is: one set of rules for the daemon and for commands.

A `run_id` names a family. Its first run has that id; further ones, and resumes, are `family.2`, `family.3`…

- The name of a family means its newest run. `family.1` means the first one, unless a run has that very id.
- A longer id means that run.
- A prefix that only one family has means the newest run whose id begins so.
- A new run that is asked for by the id of a run that exists or existed is of that run's family; any other name is a
  family of its own, also one that ends in a number.
- An id is never used again, also after its run was removed.
"""

import sqlite3

from gen_worker.contract.job.run_ids import MAX_RUN_ID
from trn.core.errors import AmbiguousError, InvalidRequestError, NotFoundError
from trn.core.runs import LineagePart, RunRecord
from trn.registry.named_queries import sql
from trn.registry.rows import read_run

FIRST = ".1"
MAX_NAMED = 5  # of the families that a prefix may mean
MAX_ANCESTORS = 1000


def find_run(connection: sqlite3.Connection, text: str, *, is_exact: bool = False) -> RunRecord:
    """The run that is meant. NotFoundError, AmbiguousError."""
    found = _get(connection, text)
    if not is_exact:
        found = _newest(connection, text) or found or _first(connection, text) or _by_prefix(connection, text)
    if found is None:
        raise NotFoundError(f"there is no run {text!r}: `trn list` shows those that there are")
    return found


def find_submission(connection: sqlite3.Connection, submission_id: str) -> RunRecord | None:
    """The run that this submission made."""
    if not submission_id:
        return None
    row = connection.execute(sql("run_of_submission"), {"submission_id": submission_id}).fetchone()
    return None if row is None else read_run(row)


def family_of(connection: sqlite3.Connection, name: str) -> str:
    """The family of the run that has or had that id, which a new one of that name is of, too; empty where none did."""
    row = connection.execute(sql("family_of"), {"run_id": name}).fetchone()
    return "" if row is None else str(row["family"])


def next_member(connection: sqlite3.Connection, family: str) -> int:
    """The number of the next run of a family. An id that somebody gave by hand, or that was removed, is passed over."""
    newest = _newest(connection, family)
    removed = connection.execute(sql("newest_removed_of_family"), {"family": family}).fetchone()["member"]
    member = max(0 if newest is None else newest.member, removed or 0) + 1
    while _is_taken(connection, member_id(family, member)):
        member += 1
    return member


def was_removed(connection: sqlite3.Connection, run_id: str) -> bool:
    """Whether there was a run of that very id, which somebody removed."""
    return connection.execute(sql("removed_run"), {"run_id": run_id}).fetchone() is not None


def member_id(family: str, member: int) -> str:
    run_id = family if member == 1 else f"{family}.{member}"
    if len(run_id) > MAX_RUN_ID:
        raise InvalidRequestError(
            f"there is a run {family!r}, and the next of its family would be {run_id!r}: that has {len(run_id)}"
            f" characters, at most {MAX_RUN_ID} are allowed; give it a shorter run_id"
        )
    return run_id


def find_lineage(connection: sqlite3.Connection, run: RunRecord) -> list[LineagePart]:
    """The run, and the ancestors whose steps led to it, the oldest first. A parent that is gone ends the line."""
    parts = [LineagePart(run_id=run.run_id, from_step=run.start_step)]
    seen = {run.run_id}
    while run.parent_run_id and run.parent_run_id not in seen and len(parts) < MAX_ANCESTORS:
        end_step = parts[0].from_step
        parent = _get(connection, run.parent_run_id)
        if parent is None:
            break
        run = parent
        seen.add(run.run_id)
        # One that began later than its child had nothing that the child went on from.
        if run.start_step < end_step:
            parts.insert(0, LineagePart(run_id=run.run_id, from_step=run.start_step, to_step=end_step))
    return parts


def _is_taken(connection: sqlite3.Connection, run_id: str) -> bool:
    return _get(connection, run_id) is not None or was_removed(connection, run_id)


def _get(connection: sqlite3.Connection, run_id: str) -> RunRecord | None:
    row = connection.execute(sql("run"), {"run_id": run_id}).fetchone()
    return None if row is None else read_run(row)


def _newest(connection: sqlite3.Connection, family: str) -> RunRecord | None:
    row = connection.execute(sql("newest_of_family"), {"family": family}).fetchone()
    if row is not None:
        return read_run(row)
    first = _get(connection, family)
    return first if first is not None and first.family == family else None


def _first(connection: sqlite3.Connection, text: str) -> RunRecord | None:
    first = _get(connection, text.removesuffix(FIRST)) if text.endswith(FIRST) else None
    return first if first is not None and first.family == first.run_id else None


def _by_prefix(connection: sqlite3.Connection, text: str) -> RunRecord | None:
    if not text:
        return None
    named = {"prefix": text, "limit": MAX_NAMED}
    families = [row["family"] for row in connection.execute(sql("families_with_prefix"), named)]
    if len(families) > 1:
        num_families = connection.execute(sql("num_families_with_prefix"), {"prefix": text}).fetchone()["num"]
        more = f" and {num_families - len(families)} more" if num_families > len(families) else ""
        raise AmbiguousError(
            f"{text!r} is the beginning of several runs: {', '.join(families)}{more}; give more of it"
        )
    if not families:
        return None
    return read_run(
        connection.execute(sql("newest_with_prefix"), {"prefix": text, "family": families[0]}).fetchone()
    )
