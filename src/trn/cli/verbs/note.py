"""`trn note RUN [TEXT|-]`: what people write about a run."""

import sys
from typing import TYPE_CHECKING

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import run_id_argument
from trn.core.terminal_text import keep_lines, plain

if TYPE_CHECKING:
    from trn.core.home import Home
    from trn.core.runs import RunRecord
    from trn.proto.records import Run

MAX_READ_BYTES = 1 << 20  # the daemon keeps fewer, and says so

EPILOG = """\b
Examples:
  trn note mnist-2b53 "best so far, lr was too high before"
  trn note mnist-2b53 - < notes.txt
  trn note mnist-2b53
  trn note mnist-2b53 ""
  trn note mnist-2b53 --name "Baseline, 3 layers"
"""


@click.command("note", epilog=EPILOG)
@run_id_argument
@click.argument("text", metavar="[TEXT|-]", required=False)
@click.option("--name", metavar="TEXT", help="Change the run's name, a title for people. The run id stays.")
@json_option
@click.pass_obj
def command(
    home: "Home", /, *, run_id: str, text: str | None, name: str | None, is_json: bool | None
) -> ExitCode:
    """Write notes about a run, in any state. They replace the earlier notes; an empty text removes them.

    `-` reads the text from stdin. Without a text and without a name: show the notes.
    """
    import asyncio

    from trn.cli.verbs.tag import require_text

    if text == "-":
        text = _read_stdin()
    elif text is not None:
        require_text(text, "TEXT")
    if name is not None:
        require_text(name, "--name")
    return asyncio.run(_note(home, Output(is_json=is_json), run_id, text, name))


async def _note(home: "Home", output: Output, run_id: str, text: str | None, name: str | None) -> ExitCode:
    from trn.cli.following.follow import resolve
    from trn.cli.verbs.tag import change_labels, report_labels

    run: Run | RunRecord = resolve(home, run_id)
    is_changed = text is not None or name is not None
    if is_changed:
        run = await change_labels(home, run, name=name, notes=text)
    report_labels(output, run, is_changed=is_changed)
    if name is not None:
        output.show(
            f"{run.run_id} has the name {plain(run.name)!r}" if run.name else f"{run.run_id} has no name"
        )
        return ExitCode.OK
    for line in run.notes.splitlines():
        output.show(keep_lines(line))
    if not run.notes:
        output.show(f"{run.run_id} has no notes")
    return ExitCode.OK


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(MAX_READ_BYTES)
    try:
        return data.decode().rstrip("\n")
    except UnicodeDecodeError as fault:
        raise click.BadParameter(f"byte {fault.start} of stdin is not UTF-8", param_hint="TEXT") from fault
