"""Shell completion of arguments: folders, live runs, the profiles of a job, names in a list."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from trn.cli.reading.registry_view import RegistryView, RunFilter
from trn.core.errors import RegistryError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

LIVE = ("PENDING", "DISPATCHING", "RUNNING")
MAX_COMPLETIONS = 100
MAX_JOB_BYTES = 1 << 20  # of a job that is read for its profiles' names

Completion = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def complete_folder(
    _ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Left to the shell."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def complete_live_run(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Runs that have not ended, the newest first."""
    from click.shell_completion import CompletionItem

    from trn.cli.command_table import chosen_home

    view = RegistryView(chosen_home(ctx.find_root().params.get("home")))
    try:
        rows = view.heads(RunFilter(states=LIVE))
    except RegistryError:
        return []  # completion never reports errors
    finally:
        view.close()
    found = [row for row in rows if row.run_id.startswith(incomplete)][:MAX_COMPLETIONS]
    return [CompletionItem(row.run_id, help=f"{row.state.lower()} {row.name}".strip()) for row in found]


def complete_served(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Served names."""
    from click.shell_completion import CompletionItem

    from trn.cli.command_table import chosen_home

    view = RegistryView(chosen_home(ctx.find_root().params.get("home")))
    try:
        found = view.served_names(incomplete)
    except RegistryError:
        return []  # completion never reports errors
    finally:
        view.close()
    return [CompletionItem(name, help=run_id) for name, run_id in found]


def complete_profile(
    ctx: click.Context, _parameter: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """The profiles of the job on the same line, if it can be read."""
    from click.shell_completion import CompletionItem

    from gen_worker.contract.documents import read_document

    config = ctx.params.get("config") or ctx.params.get("job")
    try:
        if config is None or os.stat(config).st_size > MAX_JOB_BYTES:  # noqa: PTH116
            return []
        document: Any = read_document(config)
        profiles = document["profiles"]
    except Exception:  # `trn run` reports what is wrong with it
        return []
    names = sorted(profiles) if isinstance(profiles, dict) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_names(names: Iterable[str], *, is_list: bool = False) -> Completion:
    """One of those names; with `is_list` the last of a comma-separated list."""

    def complete(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        taken = before.split(",")
        found = [name for name in names if name.startswith(last) and name not in taken]
        return [CompletionItem(f"{before}{comma}{name}") for name in found]

    return complete
