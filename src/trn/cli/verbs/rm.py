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
  trn rm --dry-run mnist mnist.2
"""


@click.command("rm", epilog=EPILOG)
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run_id)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Show what would be removed; remove nothing.")
@json_option
@click.pass_obj
def command(home: "Home", /, *, run_ids: tuple[str, ...], is_dry_run: bool, is_json: bool | None) -> ExitCode:
    """Remove ended runs: records, folders with checkpoints, and metrics. This cannot be undone.

    If one of them cannot be removed, none is: a run that has not ended, or that another run was resumed from, unless
    that run is given too. Their lines in logs/ stay.
    """
    import asyncio

    return asyncio.run(_remove(home, Output(is_json=is_json), run_ids, is_dry_run))


async def _remove(home: "Home", output: Output, run_ids: tuple[str, ...], is_dry_run: bool) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.reading.run_lookup import require_known
    from trn.cli.verbs.prune import report_freed

    require_known(home, run_ids)  # no daemon is started for an unknown run
    async with connected(home) as client:
        freed = await client.remove(run_ids, is_dry_run=is_dry_run)
    report_freed(output, freed, is_dry_run=is_dry_run)
    return ExitCode.OK
