"""`trn open RUN`: the page at one run."""

import click

from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.home import Home

EPILOG = """\b
Examples:
  trn open mnist-2b53
  trn open mnist-2b53 --no-browser
"""


@click.command("open", epilog=EPILOG)
@run_id_argument
@click.option("--no-browser", "is_silent", is_flag=True, help="Only print the address.")
@json_option
@click.pass_obj
def command(home: Home, *, run_id: str, is_silent: bool, is_json: bool | None) -> None:
    """Open the page at one run. Starts what is needed, as `trn ui` does."""
    from trn.cli.reading.run_lookup import find_run
    from trn.cli.verbs.ui import show_link, start_gateway

    run = find_run(home, run_id).run
    gateway = start_gateway(home)
    show_link(home, Output(is_json=is_json), gateway, path=f"/runs/{run.run_id}", is_opened=not is_silent)
