"""`trn tag RUN KEY=VALUE…`: set and remove tags of a run."""

from typing import TYPE_CHECKING

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trn.core.home import Home
    from trn.core.runs import RunRecord
    from trn.proto.records import Run

EPILOG = """\b
Examples:
  trn tag mnist-2b53 team=vision stage=final
  trn tag mnist-2b53 --remove stage
  trn tag mnist-2b53
"""


@click.command("tag", epilog=EPILOG)
@run_id_argument
@click.argument("pairs", metavar="[KEY=VALUE…]", nargs=-1)
@click.option("--remove", "removed", metavar="KEY", multiple=True, help="Remove this tag. May be repeated.")
@json_option
@click.pass_obj
def command(
    home: "Home", /, *, run_id: str, pairs: tuple[str, ...], removed: tuple[str, ...], is_json: bool | None
) -> ExitCode:
    """Set and remove tags of a run, in any state. Other tags stay. Without any: show them.

    `trn list --tag KEY=VALUE` finds runs by tag. The group of a job is the tag `group`.
    """
    import asyncio

    tags: dict[str, str | None] = dict.fromkeys(removed)
    for pair in pairs:
        name, has_value, value = require_text(pair, "KEY=VALUE").partition("=")
        if not has_value:
            raise click.BadParameter(
                f"found {plain(pair)!r}, expected KEY=VALUE; --remove KEY removes a tag",
                param_hint="KEY=VALUE",
            )
        if name in tags:
            raise click.BadParameter(f"{plain(name)!r} is given twice", param_hint="KEY=VALUE")
        tags[name] = value
    return asyncio.run(_tag(home, Output(is_json=is_json), run_id, tags))


async def _tag(home: "Home", output: Output, run_id: str, tags: "Mapping[str, str | None]") -> ExitCode:
    from trn.cli.following.follow import resolve

    run: Run | RunRecord = resolve(home, run_id)
    for name, value in tags.items():
        if value is None and name not in run.tags:
            output.say(f"{run.run_id} has no tag {plain(name)!r}")
    if tags:
        run = await change_labels(home, run, tags=tags)
    report_labels(output, run, is_changed=bool(tags))
    words = "  ".join(f"{plain(name)}={plain(value)}" for name, value in sorted(run.tags.items()))
    output.show(f"{run.run_id}  {words}" if words else f"{run.run_id} has no tags")
    return ExitCode.OK


async def change_labels(
    home: "Home",
    run: "Run | RunRecord",
    *,
    name: str | None = None,
    notes: str | None = None,
    tags: "Mapping[str, str | None] | None" = None,
) -> "Run":
    """The run with its new name, notes and tags."""
    from trn.cli.following.follow import connected

    async with connected(home) as client:
        return await client.update(run.run_id, name=name, notes=notes, tags=tags or {}, is_exact=True)


def report_labels(output: Output, run: "Run | RunRecord", *, is_changed: bool) -> None:
    """The JSON line of `trn tag` and `trn note`."""
    output.event(
        "run_labels",
        is_changed=is_changed,
        run_id=run.run_id,
        state=run.state,
        name=run.name,
        tags=run.tags,
        notes=run.notes,
    )


def require_text(text: str, what: str) -> str:
    """The text, if it is Unicode: other bytes of a command line are no notes and no tags."""
    try:
        text.encode()
    except UnicodeEncodeError as fault:
        raise click.BadParameter(
            f"byte {fault.start} is not UTF-8: check the terminal's encoding", param_hint=what
        ) from fault
    return text
