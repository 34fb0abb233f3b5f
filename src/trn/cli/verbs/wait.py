"""`trn wait`: wait until a run has ended; the exit code is its result."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import click

from trn.cli.durations import Seconds
from trn.cli.exit_codes import ExitCode, exit_code_of_state
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.core.runs import RunRecord
    from trn.proto.records import Run

EPILOG = """\b
Examples:
  trn wait mnist-2b53 && trn logs mnist-2b53
  trn wait mnist-2b53 --timeout 600

\b
Exits with 0 if the run completed, 1 if it failed, 8 if it was cancelled, 5 if
it has not ended after --timeout.
"""


@click.command("wait", epilog=EPILOG)
@run_id_argument
@click.option("--timeout", "timeout_s", type=Seconds(min=0), metavar="S", help="Give up after S seconds.")
@json_option
@click.pass_obj
def command(home: Home, /, *, run_id: str, timeout_s: float | None, is_json: bool | None) -> ExitCode:
    """Wait until a run has ended; the exit code is its result."""
    import asyncio

    from trn.cli.following.follow import describe, resolve

    output = Output(is_json=is_json)
    found = resolve(home, run_id)
    run = found if found.state.is_terminal else asyncio.run(_wait(home, found, timeout_s))
    state = str(run.state)
    output.record({"event": f"job_{state.lower()}", **describe(run)})
    output.show(f"{run.run_id} {output.paint_state(state, state.lower())}: {plain(run.reason)}")
    return exit_code_of_state(state)


async def _wait(home: Home, run: "RunRecord", timeout_s: float | None) -> "Run":
    import asyncio

    from trn.cli.following.daemon_watch import DaemonWatch
    from trn.cli.following.follow import connected
    from trn.core.errors import UnavailableError

    async with connected(home) as client:

        async def end() -> "AsyncGenerator[Run, None]":
            yield await client.wait(run.run_id, is_exact=True)

        try:
            async with asyncio.timeout(timeout_s):
                async for ended in DaemonWatch(client, home).following(end):
                    return ended
        except TimeoutError:
            raise UnavailableError(f"{run.run_id} has not ended after {timeout_s:g} s") from None
    raise AssertionError("a wait that ends has a run")
