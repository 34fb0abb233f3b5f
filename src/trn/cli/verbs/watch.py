"""`trn watch`: follow one run, or the changes of all of them."""

import time
from typing import TYPE_CHECKING

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import complete_run_id
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from trn.proto.records import Run

EPILOG = """\b
Examples:
  trn watch mnist-2b53
  trn watch
  trn watch --json | jq -c 'select(.state == "FAILED")'

\b
Ctrl-C stops watching; runs continue.
"""


@click.command("watch", epilog=EPILOG)
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=complete_run_id)
@json_option
@click.pass_obj
def command(home: Home, /, *, run_id: str | None, is_json: bool | None) -> ExitCode:
    """Follow a run to its end; the exit code is its result. Without RUN, show the changes of all runs."""
    import asyncio

    output = Output(is_json=is_json)
    if run_id is not None:
        return asyncio.run(_watch_one(home, output, run_id))
    try:
        return asyncio.run(_watch_all(home, output))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


async def _watch_one(home: Home, output: Output, run_id: str) -> ExitCode:
    from trn.cli.following.follow import Follower, connected, resolve

    run_id = resolve(home, run_id).run_id
    async with connected(home) as client:
        run = await client.get(run_id, is_exact=True)
        return await Follower(client, home, output, run, is_ours=False).follow()


async def _watch_all(home: Home, output: Output) -> ExitCode:
    """One object for each change; at a terminal, a line when the state or its reason changes."""
    from trn.cli.following.daemon_watch import DaemonWatch
    from trn.cli.following.follow import connected, describe

    async with connected(home) as client:
        change = (await client.health()).last_change
        output.record({"event": "watch_started", "change": change})
        output.say(f"watching all runs of {home.root}; Ctrl-C stops")
        shown: dict[str, tuple[str, str]] = {}

        def again() -> "AsyncGenerator[Run, None]":
            return client.watch(after_change=change)

        async for run in DaemonWatch(client, home).following(again):
            change = max(change, run.change)
            output.record({"event": "run_changed", **describe(run)})
            if shown.get(run.run_id) != (run.state, run.reason):
                shown[run.run_id] = (run.state, run.reason)
                clock = time.strftime("%H:%M:%S")
                state = output.paint_state(run.state, f"{run.state.lower():<11}")
                output.show(f"{clock}  {run.run_id}  {state}  {plain(run.reason)}")
            if run.is_terminal:
                shown.pop(run.run_id, None)
    return ExitCode.OK
