"""`trn rm RUN…`: remove ended runs with their folders and metrics."""

from typing import TYPE_CHECKING

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import complete_run_id

if TYPE_CHECKING:
    from trn.core.home import Home

EPILOG = """\b
Examples:
  trn rm mnist-2b53
  trn rm --dry-run mnist.1 mnist.2
"""


@click.command("rm", epilog=EPILOG)
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run_id)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Show what would be removed; remove nothing.")
@json_option
@click.pass_obj
def command(home: "Home", /, *, run_ids: tuple[str, ...], is_dry_run: bool, is_json: bool | None) -> ExitCode:
    """Remove ended runs: records, folders with checkpoints, and metrics. This cannot be undone.

    If one of them cannot be removed, none is: a run that has not ended, or that another run was resumed from, unless
    that run is given too. Their lines in logs/ stay. A name that several runs have is refused: `NAME.1` is the first.
    """
    import asyncio

    return asyncio.run(_remove(home, Output(is_json=is_json), run_ids, is_dry_run))


async def _remove(home: "Home", output: Output, run_ids: tuple[str, ...], is_dry_run: bool) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.reading.run_lookup import require_known
    from trn.cli.verbs.prune import report_freed

    require_known(home, run_ids)  # no daemon is started for an unknown run
    _require_exact(home, run_ids)
    async with connected(home) as client:
        freed = await client.remove(run_ids, is_dry_run=is_dry_run)
    report_freed(output, freed, is_dry_run=is_dry_run)
    return ExitCode.OK


def _require_exact(home: "Home", run_ids: tuple[str, ...]) -> None:
    """AmbiguousError where a name is a run's own id and means a newer run of its family: the wrong one would be gone."""
    from trn.cli.reading.run_lookup import open_registry
    from trn.core.errors import AmbiguousError

    with open_registry(home) as reader:
        for text in run_ids:
            if reader.has(text) and (newest := reader.find(text).run_id) != text:
                raise AmbiguousError(
                    f"{text!r} is the id of the first run of its family, and as a name it means the newest, {newest!r}:"
                    f" give {text}.1 or {newest}"
                )
