"""The registry as `trn list` sees it: a few columns, read without a daemon, with nothing but the standard library.

`trn.registry.reader` gives whole records; it costs an import that a list and a completion should not wait for.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from trn.core.errors import RegistryError
from trn.core.home import Home

if TYPE_CHECKING:
    import sqlite3

    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("PENDING", "DISPATCHING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED")
MAX_COMPLETIONS = 100
BUSY_TIMEOUT_S = 10.0


class RunRow(NamedTuple):
    """A run without what was asked for. `cause`, `metrics`, `devices` and `tags` are the registry's JSON texts."""

    run_id: str
    state: str
    cause: str
    name: str
    priority: int
    parent_run_id: str
    attempt: int
    max_attempts: int
    step: int
    end_step: int | None
    submitted_ms: int
    updated_ms: int
    ended_ms: int | None
    metrics: str
    devices: str
    tags: str
    change: int
    family: str
    member: int
    start_step: int
    notes: str
    kind: str
    served_name: str  # of a server
    url: str
    live: str  # the model version that it answers with, as a JSON text
    is_ready: bool  # its newest attempt answers, or did until it ended

    @property
    def serves(self) -> str:
        """What a server answers with; empty for a run that serves nothing."""
        import json

        live = json.loads(self.live)
        return f"{live['run_id']}@{live['step']}" if live else ""

    @property
    def reason(self) -> str:
        """Its cause in words; of a server that answers, with what and where."""
        import json

        from trn.core.cause_words import say_cause
        from trn.core.causes import Cause

        cause = Cause(**json.loads(self.cause))
        if cause.id == "running" and self.is_ready:
            return f"serves {self.serves} at {self.url}"
        return say_cause(cause)

    def record(self) -> dict[str, Any]:
        """Every field, for JSON."""
        import json

        names = ("cause", "metrics", "devices", "tags", "live")
        texts = {name: json.loads(getattr(self, name)) for name in names}
        if texts["live"]:
            facts = ("run_id", "step", "weights_hash", "code_hash")
            texts["live"] = {name: texts["live"].get(name) for name in facts}
        is_ready = bool(self.is_ready)
        record = {
            "run_id": self.run_id,
            "state": self.state,
            "reason": self.reason,
            **self._asdict(),
            **texts,
        }
        return {**record, "is_ready": is_ready}


class RunFilter(NamedTuple):
    """Which runs; what is left empty does not filter."""

    states: Sequence[str] = ()
    name: str = ""
    tag: str = ""  # KEY or KEY=VALUE
    since_ms: int = 0

    def values(self) -> dict[str, str | int]:
        key, has_value, value = self.tag.partition("=")
        return {
            "state_words": f"|{'|'.join(self.states)}|" if self.states else "",
            "name": self.name,
            "since_ms": self.since_ms,
            "tag": key,
            "is_any": not has_value,
            "tag_value": value,
        }


class RegistryView:
    """One read-only connection. A registry that does not exist has no runs."""

    def __init__(self, home: Home) -> None:
        self.home, self._path = home, str(home.registry)
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def heads(self, which: RunFilter, *, limit: int = -1) -> list[RunRow]:
        """The newest first. A limit below 0 is none."""
        rows = self._read("heads", {**which.values(), "limit": limit})
        return [RunRow(*row) for row in rows]

    def hyperparams(self, run_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """By run; those without any are left out."""
        import json

        rows = self._read("hyperparams", {"run_ids": json.dumps(list(run_ids))})
        return {run_id: json.loads(text) for run_id, text in rows}

    def last_change(self) -> int:
        """Another after each change of any run."""
        rows = self._read("last_change", {})
        return int(rows[0][0]) if rows else 0

    def num_runs(self, which: RunFilter) -> int:
        rows = self._read("num_runs", which.values())
        return int(rows[0][0]) if rows else 0

    def ids_with_prefix(self, prefix: str, limit: int = MAX_COMPLETIONS) -> list[tuple[str, str, str]]:
        """(id, state, name), the newest first."""
        return self._read("ids_with_prefix", {"prefix": prefix, "limit": limit})

    def served_names(self, prefix: str, limit: int = MAX_COMPLETIONS) -> list[tuple[str, str]]:
        """(name, its server's run)."""
        return self._read("served_names", {"prefix": prefix, "limit": limit})

    def _read(self, query: str, values: dict[str, Any]) -> list[Any]:
        import sqlite3

        try:
            if self._connection is None:
                if not os.path.exists(self._path):  # noqa: PTH110
                    return []
                self._connection = open_read_only(self._path)
            return self._connection.execute(_sql(query), values).fetchall()
        except sqlite3.Error as fault:
            raise unreadable(self.home, fault) from fault


def unreadable(home: Home, fault: "sqlite3.Error") -> RegistryError:
    """What to say where the registry does not answer."""
    if str(fault).startswith("no such "):
        return older_release(home)
    return RegistryError(f"{home.registry} cannot be read: {fault}; `{home.check_command}` looks through it")


def older_release(home: Home) -> RegistryError:
    return RegistryError(
        f"{home.registry} was written by an older trn: `trn daemon start` brings it up to date"
    )


def open_read_only(path: str) -> "sqlite3.Connection":
    """Also in a home that cannot be written."""
    import sqlite3
    from urllib.parse import quote

    address = f"file:{quote(path)}?mode=ro"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    try:
        connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        wal = f"{path}-wal"
        if os.path.exists(wal) and os.path.getsize(wal):  # noqa: PTH110, PTH202
            raise
        # A home that we may not write into, and no daemon: SQLite cannot keep its own files there, and need not.
        return sqlite3.connect(f"{address}&immutable=1", uri=True, isolation_level=None)
    return connection


def _sql(name: str) -> str:
    folder = os.path.dirname(__file__)  # noqa: PTH120
    with open(f"{folder}/queries.sql", encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    return text.split(f"-- name: {name}\n", 1)[1].split("-- name: ", 1)[0]


def run_id_argument(command: F) -> F:
    """`RUN`: an id or a prefix that only one family has; the shell completes it from the registry."""
    return click.argument("run_id", metavar="RUN", shell_complete=complete_run_id)(command)


def complete_run_id(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    from trn.cli.command_table import chosen_home

    view = RegistryView(chosen_home(ctx.find_root().params.get("home")))
    try:
        found = view.ids_with_prefix(incomplete)
    except RegistryError:
        return []  # a completion that fails says nothing
    finally:
        view.close()
    return [CompletionItem(run_id, help=f"{state.lower()} {name}".strip()) for run_id, state, name in found]
