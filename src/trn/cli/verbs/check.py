"""`trn check MODULE:SYMBOL`: is a trainer class correct, and does it resume exactly?"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.core.home import Home

EPILOG = """\b
Examples:
  trn check my_trainer:MyTrainer
  trn check my_trainer:MyTrainer --config job.yaml --steps 40
  trn check my_trainer:MyTrainer --output certificate

\b
Exits with 0 if the class passes, 1 if it fails, 3 if it cannot be tested. The
certificate and the logs are kept in `checks` of the home; with --output
everything is kept in that folder.
"""


@click.command(epilog=EPILOG)
@click.argument("trainer", metavar="MODULE:SYMBOL")
@click.option(
    "--config",
    metavar="JOB",
    type=click.Path(readable=False),
    help="A job with data for the class (default: mock batches 0, 1, 2, …).",
)
@click.option(
    "--steps",
    type=click.IntRange(min=6),
    metavar="N",
    help="Number of steps (default: 12 or an epoch).",
)
@click.option("--seed", type=int, default=0, metavar="S", help="Seed of the random kill (default: 0).")
@click.option(
    "--output",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="A new folder for all results and the runs themselves.",
)
@json_option
@click.pass_obj
def command(
    home: "Home",
    trainer: str,
    config: str | None,
    steps: int | None,
    seed: int,
    folder: str | None,
    is_json: bool | None,
) -> int:
    """Train a few steps without interruption, and again with three kills and resumes; compare every step.

    Batches, losses and state must be bit-exact. If they differ, experiments look for the cause.
    """
    from tempfile import TemporaryDirectory

    from trn.cli.worker_tool import reading_records

    output = Output(is_json=is_json)
    code = ExitCode.INTERRUPTED  # until there is a result
    with contextlib.ExitStack() as stack:
        if folder is None:
            made = TemporaryDirectory(prefix="trn-check-", ignore_cleanup_errors=True)
            words = [f"--output={stack.enter_context(made)}", f"--keep={_place(home, trainer)}"]
        else:
            words = [f"--output={folder}"]
        words += [f"--seed={seed}"]
        words += [] if config is None else [f"--config={config}"]
        words += [] if steps is None else [f"--steps={steps}"]
        for record in stack.enter_context(reading_records("certificate", [*words, "--", trainer])):
            ended = _tell(record, output)
            code = code if ended is None else ended
    return code


def _place(home: "Home", trainer: str) -> Path:
    """A new folder in the home, named by trainer class and time."""
    import re
    import time

    name = re.sub(r"[^A-Za-z0-9._-]+", ".", trainer).strip(".")[:100]
    begin = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (home.checks / f"{begin}{f'-{number}' if number else ''}" for number in range(1000))
    return next(place for place in tries if not place.exists())


def _tell(record: dict[str, Any], output: Output) -> ExitCode | None:
    """The exit code, once there is a result."""
    if record["event"] == "certificate_progress":
        output.say(f"trn: {record['message']}")
        return None
    if record["event"] == "certificate_rejected":
        output.record(record)
        output.say("\n".join(map(plain, f"trn: {record['error']}".splitlines())))
        return ExitCode.REFUSED
    verdict, _, rest = record.pop("text").partition("\n")
    output.record(record)
    if output.is_json:
        output.say(f"trn: {plain(verdict)}; kept in {record['folder']}")
    output.show(output.paint(verdict, "green" if record["is_sound"] else "red", is_bold=True))
    output.show(rest)
    return ExitCode.OK if record["is_sound"] else ExitCode.FAILED_RUN
