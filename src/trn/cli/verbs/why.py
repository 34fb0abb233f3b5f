"""`trn why RUN`: what, why and what next, in three short lines."""

import click

from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.home import Home
from trn.core.terminal_text import plain

EPILOG = """\b
Examples:
  trn why mnist-1f2e
  trn why mnist --json | jq -r .fault
"""


@click.command("why", epilog=EPILOG, short_help="Explain why a run waits, runs or ended.")
@run_id_argument
@json_option
@click.pass_obj
def command(home: Home, *, run_id: str, is_json: bool | None) -> None:
    """Explain a run in three lines: what happens, why (and whose fault it is), and what comes next."""
    from trn.cli.durations import now_ms
    from trn.cli.reading.explanation import explain
    from trn.cli.reading.run_lookup import find_run, look_around
    from trn.client.daemon_start import find_daemon

    output = Output(is_json=is_json)
    found, at_ms = find_run(home, run_id), now_ms()
    told = explain(
        found.as_typed,
        found.attempts,
        at_ms=at_ms,
        is_daemon_up=find_daemon(home) is not None,
        around=look_around(home, found, at_ms),
    )
    output.record({**told.record(), "run_id": found.run.run_id})
    for line in told.lines:
        output.show_wrapped(plain(line))
