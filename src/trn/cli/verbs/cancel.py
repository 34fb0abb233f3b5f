"""`trn cancel`: stop a run. It saves a checkpoint if it can."""

from typing import TYPE_CHECKING

import click

from trn.cli.completion import complete_live_run
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.core.runs import RunRecord
    from trn.proto.records import Run

EPILOG = """\b
Examples:
  trn cancel mnist-2b53
  trn cancel mnist-2b53 --reason "wrong data" && trn wait mnist-2b53
"""


@click.command("cancel", epilog=EPILOG)
@click.argument("run_id", metavar="RUN", shell_complete=complete_live_run)
@click.option("--reason", default="", metavar="TEXT", help="Why; kept with the run.")
@json_option
@click.pass_obj
def command(home: Home, /, *, run_id: str, reason: str, is_json: bool | None) -> ExitCode:
    """Stop a run. It saves a checkpoint if it can; `trn resume` continues from there.

    Returns when the request is recorded, not when the run has ended. Exit code 6: the run had ended before.
    """
    import asyncio

    return asyncio.run(_cancel(home, Output(is_json=is_json), run_id, reason))


async def _cancel(home: Home, output: Output, run_id: str, reason: str) -> ExitCode:
    from trn.cli.following.follow import connected, describe, resolve

    found = resolve(home, run_id)
    run: Run | RunRecord = found
    was_live = not found.state.is_terminal
    if was_live:  # else no daemon is started
        async with connected(home) as client:
            run, was_live = await client.cancel(found.run_id, reason, is_exact=True)
    output.record({"event": "cancel_wanted", "was_live": was_live, **describe(run)})
    if was_live:
        output.show(f"{run.run_id} is being cancelled; `trn wait {run.run_id}` waits for its end")
        return ExitCode.OK
    output.say(f"{run.run_id} has already ended: {run.state.lower()}")
    return ExitCode.CONFLICT
