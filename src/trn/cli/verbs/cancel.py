"""`trn cancel RUN…`: stop runs. Each saves a checkpoint if it can."""

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
  trn cancel mnist mnist.2
  trn cancel mnist-2b53 --reason "wrong data" && trn wait mnist-2b53
"""


@click.command("cancel", epilog=EPILOG)
@click.argument("run_ids", metavar="RUN…", nargs=-1, required=True, shell_complete=complete_live_run)
@click.option("--reason", default="", metavar="TEXT", help="Why; kept with the run.")
@json_option
@click.pass_obj
def command(home: Home, /, *, run_ids: tuple[str, ...], reason: str, is_json: bool | None) -> ExitCode:
    """Stop runs. Each saves a checkpoint if it can; `trn resume` continues from there.

    Returns when the requests are recorded, not when the runs have ended. If one of them is unknown, none is cancelled.
    Exit code 6: one of them had ended before; the others are cancelled.
    """
    import asyncio

    return asyncio.run(_cancel(home, Output(is_json=is_json), run_ids, reason))


async def _cancel(home: Home, output: Output, run_ids: tuple[str, ...], reason: str) -> ExitCode:
    from trn.cli.following.follow import connected, describe, resolve

    runs: dict[str, Run | RunRecord] = {}
    for text in run_ids:
        found = resolve(home, text)
        runs[found.run_id] = found
    live = [run_id for run_id, run in runs.items() if run.ended_ms is None]
    cancelled = set()
    if live:  # else no daemon is started
        async with connected(home) as client:
            for run_id in live:
                runs[run_id], was_live = await client.cancel(run_id, reason, is_exact=True)
                if was_live:
                    cancelled.add(run_id)
    for run_id, run in runs.items():
        output.record({"event": "cancel_wanted", "was_live": run_id in cancelled, **describe(run)})
        if run_id in cancelled:
            output.show(f"{run_id} is being cancelled; `trn wait {run_id}` waits for its end")
        else:
            output.say(f"{run_id} has already ended: {run.state.lower()}")
    return ExitCode.OK if len(cancelled) == len(runs) else ExitCode.CONFLICT
