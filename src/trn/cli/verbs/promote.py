"""`trn promote`: change the model that a served name answers with."""

from typing import TYPE_CHECKING, Any

import click

from trn.cli.completion import complete_served
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.core.serving.records import Promotion

EPILOG = """\b
Examples:
  trn promote mnist @500
  trn promote mnist mnist.2@best --set metric=val/loss --set tolerance=0.01
  trn promote mnist @500 --percent 10
  trn promote mnist @500 --shadow
  TOKEN=$(trn promote mnist --token)

\b
@STEP, @best and @latest are of the run that is served now.
Exit code 1: the gate refused it, and the model before it answers.
"""


@click.command("promote", epilog=EPILOG)
@click.argument("name", metavar="NAME", shell_complete=complete_served)
@click.argument("model", metavar="[RUN@WHICH]", required=False)
@click.option("--shadow", "is_shadow", is_flag=True, help="Only compare its answers; none is sent.")
@click.option(
    "--percent",
    type=click.FloatRange(min=0, max=100, min_open=True, max_open=True),
    metavar="P",
    help="Let it answer P percent of the requests.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change the gate of this promotion: metric, mode, tolerance, max_latency_ms.",
)
@click.option("--no-wait", "is_unwaited", is_flag=True, help="Return once it is recorded.")
@click.option(
    "--token", "is_token", is_flag=True, help="Print a token that may only promote NAME, over the network."
)
@json_option
@click.pass_obj
def command(home: Home, /, *, name: str, model: str | None, is_token: bool, **options: Any) -> ExitCode:
    """Change the model that a served name answers with, through its gate and without a failed request."""
    import asyncio

    if is_token == (model is not None):
        raise click.UsageError("name the model, for example `trn promote NAME @500`, or give --token")
    if options["is_shadow"] and options["percent"] is not None:
        raise click.UsageError("--shadow and --percent exclude each other")
    output = Output(is_json=options["is_json"])
    return asyncio.run(
        _print_token(home, output, name) if is_token else _promote(home, output, name, model or "", options)
    )


async def _print_token(home: Home, output: Output, name: str) -> ExitCode:
    from trn.cli.following.follow import connected

    async with connected(home) as client:
        token = await client.make_promote_token(name)
    output.event("token", name=name, token=token)
    output.show(token)
    return ExitCode.OK


async def _promote(home: Home, output: Output, name: str, model: str, options: dict[str, Any]) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.following.served import report_promotion
    from trn.cli.submitting.model_job import absolute_model
    from trn.client.job_file import read_assignments

    gate = read_assignments(options["assignments"])
    action = "shadow" if options["is_shadow"] else "promote" if options["percent"] is None else "split"
    async with connected(home) as client:
        promotion: Promotion = await client.promote(
            name,
            absolute_model(model),
            action=action,
            percent=options["percent"] or 0.0,
            gate=gate,
            by=user_name(),
        )
        return await report_promotion(client, home, output, promotion, is_waited=not options["is_unwaited"])


def user_name() -> str:
    """Who asks, for the record."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return ""
