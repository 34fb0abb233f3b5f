"""`trn rm RUN…`: forget ended runs, with their folders and metrics."""

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


@click.command("rm", epilog=EPILOG, short_help="Remove ended runs.")
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_run_id)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Show what would be freed, remove nothing.")
@json_option
@click.pass_obj
def command(home: "Home", /, *, run_ids: tuple[str, ...], is_dry_run: bool, is_json: bool | None) -> ExitCode:
    """Remove ended runs: their records, folders with checkpoints, and metrics. There is no way back.

    All of them are removed or, where one has to stay, none: a run that has not ended, and one that another run began
    from, unless that one is named as well. What was copied to logs/ stays.
    """
    import asyncio

    return asyncio.run(_remove(home, Output(is_json=is_json), run_ids, is_dry_run))


async def _remove(home: "Home", output: Output, run_ids: tuple[str, ...], is_dry_run: bool) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.reading.run_lookup import require_known
    from trn.cli.removed import report_freed

    require_known(home, run_ids)  # no daemon is started for a run that is not there
    async with connected(home) as client:
        freed = await client.remove(run_ids, is_dry_run=is_dry_run)
    report_freed(output, freed, is_dry_run=is_dry_run)
    return ExitCode.OK
