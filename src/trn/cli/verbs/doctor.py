"""`trn doctor`: what this machine can do, its problems, and how to fix them."""

from typing import TYPE_CHECKING

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.core.home import Home

COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


EPILOG = """\b
Examples:
  trn doctor
  trn doctor --json | jq '.findings[] | select(.level == "error")'

\b
Exits with 0 if there is no error, else with 1.
"""


@click.command(epilog=EPILOG)
@json_option
@click.pass_obj
def command(home: "Home", is_json: bool | None) -> int:
    """Show what this machine can do: interpreter, torch, GPUs, memory, disk, limits, clock."""
    from trn.cli.worker_tool import reading_records

    output = Output(is_json=is_json)
    with reading_records("doctor", ["--home", str(home.root)]) as records:
        (report,) = records
    output.record(report)
    width = max(len(finding["check"]) for finding in report["findings"])
    for finding in report["findings"]:
        level = finding["level"]
        name = f"{finding['check']:<{width}}"
        output.show(
            f"{output.paint(f'{level:<7}', COLOURS.get(level, ''))}  {name}  {plain(finding['message'])}"
        )
        if finding["remedy"]:
            output.show(f"{'':<7}  {'':<{width}}  -> {plain(finding['remedy'])}")
    errors = [finding["check"] for finding in report["findings"] if finding["level"] == "error"]
    output.show()
    if errors:
        output.show(f"This machine cannot train yet: see {', '.join(errors)}.")
    else:
        output.show("This machine is ready.")
    return ExitCode.OK if report["is_ready"] else ExitCode.FAILED_RUN
