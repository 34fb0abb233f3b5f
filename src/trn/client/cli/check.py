"""`trn check MODULE:SYMBOL`: is a trainer class sound, and does it resume exactly?"""

import click

from trn.client.cli.exit_codes import ExitCode
from trn.client.cli.output import Output, json_option


@click.command(
    epilog="Ends with 0 for a sound class, with 1 for one that is not, with 3 where it could not be tried.\n\n"
    "Examples:\n\n  trn check my_trainer:MyTrainer\n\n"
    "  trn check my_trainer:MyTrainer --config job.yaml --steps 40 --output certificate"
)
@click.argument("trainer", metavar="MODULE:SYMBOL")
@click.option(
    "--config", metavar="JOB", help="A job with data that the class takes (default: mock batches 0, 1, 2, …)."
)
@click.option(
    "--steps",
    type=click.IntRange(min=6),
    metavar="N",
    help="How many steps to train (default: 12 or an epoch).",
)
@click.option("--seed", type=int, default=0, metavar="S", help="Of the random kill (default: 0).")
@click.option(
    "--output", "folder", metavar="DIR", help="A new folder for all that is found (default: a temporary one)."
)
@json_option
def command(
    trainer: str, config: str | None, steps: int | None, seed: int, folder: str | None, is_json: bool
) -> int:
    """Train a few steps straight, and again with three kills and resumes; compare every step.

    Batches, losses and state must be equal to the bit. Where they part, experiments look for the cause.
    """
    from tempfile import mkdtemp

    from trn.client.cli.worker_tool import read_records

    output = Output(is_json=is_json)
    words = [f"--output={folder or mkdtemp(prefix='trn-check-')}", f"--seed={seed}"]
    words += [] if config is None else [f"--config={config}"]
    words += [] if steps is None else [f"--steps={steps}"]
    code = ExitCode.INTERRUPTED  # until it has said how it ended
    for record in read_records("certificate", [*words, "--", trainer]):
        if record["event"] == "certificate_progress":
            output.say(f"trn: {record['message']}")
            continue
        if record["event"] == "certificate_rejected":
            output.record(record)
            output.say(f"trn: {record['error']}")
            code = ExitCode.REFUSED
            continue
        verdict, _, rest = record.pop("text").partition("\n")
        output.record(record)
        output.show(output.paint(verdict, "green" if record["is_sound"] else "red", is_bold=True))
        output.show(rest)
        code = ExitCode.OK if record["is_sound"] else ExitCode.FAILED_RUN
    return code
