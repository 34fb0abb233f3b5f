"""`trn prune`: remove old runs and what nobody needs any more."""

import sys
from typing import TYPE_CHECKING, Any

import click

from trn.cli.durations import now_ms, parse_since
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.core.home import Home

DEFAULT_AGE = "30d"

EPILOG = """\b
Examples:
  trn prune --dry-run
  trn prune --older-than 7d --keep-best 3
  trn prune --older-than 7d --keep-best 3 --metric val/accuracy --mode max --yes
"""


def _parse_age(_ctx: click.Context, _parameter: click.Parameter, text: str) -> int:
    try:
        return parse_since(text, now_ms())
    except ValueError:
        raise click.BadParameter(f"{text!r} is no age: expected 12h, 30d, 2w or an ISO date") from None


@click.command("prune", epilog=EPILOG, short_help="Remove old runs and what nobody needs.")
@click.option(
    "--older-than",
    "ended_before_ms",
    callback=_parse_age,
    default=DEFAULT_AGE,
    show_default=True,
    metavar="AGE",
    help="Runs that ended longer ago: 12h, 30d, 2w, or before an ISO date.",
)
@click.option(
    "--keep-best",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Of each trainer class, the N best runs stay.",
)
@click.option(
    "--metric", default="", metavar="NAME", help="What is best (default: val/loss, else train/loss)."
)
@click.option(
    "--mode", type=click.Choice(("min", "max")), default="min", show_default=True, help="Which value is best."
)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Show what would be freed, remove nothing.")
@click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def command(home: "Home", /, *, is_json: bool | None, **options: Any) -> ExitCode:
    """Remove what nobody needs: runs that ended long ago, superseded checkpoints of those that stay, old code, caches.

    A run stays while a run that stays began from it, while a run that waits or runs uses its files, and with
    --keep-best for its result. Of a run that stays, the newest and the best checkpoint stay. At a terminal it shows
    what it would remove and asks; elsewhere it needs --yes or --dry-run.
    """
    import asyncio

    output = Output(is_json=is_json)
    can_ask = sys.stdin.isatty() and not output.is_json
    if not (options["is_dry_run"] or options["is_sure"] or can_ask):
        raise click.UsageError("nobody can be asked here: give --yes to remove, or --dry-run to look")
    if options["mode"] == "max" and not options["metric"]:
        raise click.UsageError("--mode max needs --metric: of a loss, the smallest is best")
    return asyncio.run(_prune(home, output, options))


async def _prune(home: "Home", output: Output, options: dict[str, Any]) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.removed import report_freed

    rule = {
        "ended_before_ms": options["ended_before_ms"],
        "keep_best": options["keep_best"],
        "metric": options["metric"],
        "is_max_best": options["mode"] == "max",
    }
    is_asked = not (options["is_sure"] or options["is_dry_run"])
    async with connected(home) as client:
        pruned = await client.prune(**rule, is_dry_run=is_asked or options["is_dry_run"])
        for reason in pruned.kept:
            output.say(f"trn: kept {plain(reason)}")
        report_freed(output, pruned.freed, is_dry_run=is_asked or options["is_dry_run"])
        if not is_asked or not pruned.freed:
            return ExitCode.OK
        if not click.confirm("remove all this?", err=True):
            return ExitCode.OK
        done = await client.prune(**rule)
        report_freed(output, done.freed, is_dry_run=False)
    return ExitCode.OK
