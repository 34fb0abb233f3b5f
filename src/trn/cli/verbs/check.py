"""`trn check MODULE:SYMBOL`: is a trainer class sound, and does it resume exactly?"""

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
Ends with 0 for a sound class, with 1 for one that is not, with 3 where it could
not be tried. The certificate and the logs are kept in the home's `checks`; with
--output everything is, in that folder.
"""


@click.command(epilog=EPILOG)
@click.argument("trainer", metavar="MODULE:SYMBOL")
@click.option(
    "--config",
    metavar="JOB",
    type=click.Path(readable=False),
    help="A job with data that the class takes (default: mock batches 0, 1, 2, …).",
)
@click.option(
    "--steps",
    type=click.IntRange(min=6),
    metavar="N",
    help="How many steps to train (default: 12 or an epoch).",
)
@click.option("--seed", type=int, default=0, metavar="S", help="Of the random kill (default: 0).")
@click.option(
    "--output",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="A new folder for all that is found, with the runs themselves.",
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
    """Train a few steps straight, and again with three kills and resumes; compare every step.

    Batches, losses and state must be equal to the bit. Where they part, experiments look for the cause.
    """
    from tempfile import TemporaryDirectory

    from trn.cli.worker_tool import reading_records

    output = Output(is_json=is_json)
    code = ExitCode.INTERRUPTED  # until it has said how it ended
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
    """A folder of the home that is not there yet: by trainer class and time."""
    import re
    import time

    name = re.sub(r"[^A-Za-z0-9._-]+", ".", trainer).strip(".")[:100]
    begin = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    tries = (home.checks / f"{begin}{f'-{number}' if number else ''}" for number in range(1000))
    return next(place for place in tries if not place.exists())


def _tell(record: dict[str, Any], output: Output) -> ExitCode | None:
    """How it ended, where it did."""
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
