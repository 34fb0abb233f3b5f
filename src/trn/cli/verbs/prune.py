"""`trn prune`: remove old runs and data that is no longer needed."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gen_worker.contract.sizes import show_bytes
from trn.cli.durations import now_ms, parse_since
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.core.home import Home
    from trn.proto.records import Freed

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
        raise click.BadParameter(f"{text!r} is not an age: expected 12h, 30d, 2w or an ISO date") from None


@click.command("prune", epilog=EPILOG)
@click.option(
    "--older-than",
    "ended_before_ms",
    callback=_parse_age,
    default=DEFAULT_AGE,
    show_default=True,
    metavar="AGE",
    help="Remove runs that ended longer ago than this: 12h, 30d, 2w, or before an ISO date.",
)
@click.option(
    "--keep-best",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Keep the N best runs of each trainer class.",
)
@click.option(
    "--metric",
    default="",
    metavar="NAME",
    help="The metric for --keep-best (default: val/loss, else train/loss).",
)
@click.option(
    "--mode",
    type=click.Choice(("min", "max")),
    default="min",
    show_default=True,
    help="Whether the smallest or the largest value is best.",
)
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Show what would be removed; remove nothing.")
@click.option("--yes", "-y", "is_sure", is_flag=True, help="Do not ask for confirmation.")
@json_option
@click.pass_obj
def command(home: "Home", /, *, is_json: bool | None, **options: Any) -> ExitCode:
    """Remove runs that ended long ago, and superseded checkpoints, code snapshots and caches.

    A run is kept if a kept run was resumed from it, if a live run uses its files, or by --keep-best. Of a kept run, the
    newest and the best checkpoint are kept. At a terminal, asks for confirmation; elsewhere needs --yes or --dry-run.
    """
    import asyncio

    output = Output(is_json=is_json)
    can_ask = sys.stdin.isatty() and not output.is_json
    if not (options["is_dry_run"] or options["is_sure"] or can_ask):
        raise click.UsageError(
            "no terminal to ask for confirmation: give --yes to remove, or --dry-run to look"
        )
    if options["mode"] == "max" and not options["metric"]:
        raise click.UsageError(
            "--mode max needs --metric: the default metric is a loss, whose smallest value is best"
        )
    return asyncio.run(_prune(home, output, options))


async def _prune(home: "Home", output: Output, options: dict[str, Any]) -> ExitCode:
    from trn.cli.following.follow import connected

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
        if not click.confirm("Remove all this?", err=True):
            return ExitCode.OK
        done = await client.prune(**rule)
        report_freed(output, done.freed, is_dry_run=False)
    return ExitCode.OK


def report_freed(output: Output, freed: "Sequence[Freed]", *, is_dry_run: bool) -> int:
    """Print a line for each and the sum. Returns the number of bytes."""
    for item in freed:
        output.record(
            {
                "event": "would_remove" if is_dry_run else "removed",
                "kind": item.kind,
                "name": item.name,
                "size_bytes": item.size_bytes,
            }
        )
        if item.kind == "gone":
            output.show(f"{plain(item.name)} was already removed")
        else:
            output.show(f"{item.kind:<10}  {show_bytes(item.size_bytes):>10}  {plain(item.name)}")
    size_bytes = sum(item.size_bytes for item in freed)
    verb = "would be freed (dry run)" if is_dry_run else "freed"
    output.show(f"{show_bytes(size_bytes)} {verb}")
    return size_bytes
