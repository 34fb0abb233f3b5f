"""`trn rollback`: go back to the model that a served name answered with before."""

import click

from trn.cli.completion import complete_served
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.home import Home

EPILOG = """\b
Examples:
  trn rollback mnist

\b
A shadow or a split is ended first. A second rollback undoes the first.
"""


@click.command("rollback", epilog=EPILOG)
@click.argument("name", metavar="NAME", shell_complete=complete_served)
@click.option("--no-wait", "is_unwaited", is_flag=True, help="Return once it is recorded.")
@json_option
@click.pass_obj
def command(home: Home, /, *, name: str, is_unwaited: bool, is_json: bool | None) -> ExitCode:
    """Go back to the model that a served name answered with before. The gate does not measure it."""
    import asyncio

    return asyncio.run(_rollback(home, Output(is_json=is_json), name, is_waited=not is_unwaited))


async def _rollback(home: Home, output: Output, name: str, *, is_waited: bool) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.following.served import report_promotion
    from trn.cli.verbs.promote import user_name

    async with connected(home) as client:
        promotion = await client.rollback(name, by=user_name())
        return await report_promotion(client, home, output, promotion, is_waited=is_waited)
