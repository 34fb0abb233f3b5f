"""`trn predict`: predictions of a checkpoint for parquet files, as a run."""

import os
from pathlib import Path
from typing import Any

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output
from trn.cli.reading.registry_view import complete_run_id
from trn.cli.submitting.model_job import absolute_model, choose_devices, device_options, make_model_job
from trn.cli.submitting.submit_options import read_submit_options, submit_options
from trn.core.home import Home
from trn.core.terminal_text import plain

EPILOG = """\b
Examples:
  trn predict mnist --data rows.parquet --out predictions
  trn predict mnist@500 --data 'days/*.parquet' --out predictions --copy id
  trn predict mnist --data dataset/ --out predictions --detach

\b
RUN means RUN@best: the checkpoint with the best metric, else the newest. RUN@latest
and RUN@STEP name another, as does the path of a .meta.json.
A prediction that was stopped continues when it is submitted again.
"""


@click.command("predict", epilog=EPILOG)
@click.argument("model", metavar="RUN[@WHICH]", shell_complete=complete_run_id)
@click.option(
    "--data",
    "data",
    metavar="GLOB|DIR",
    multiple=True,
    required=True,
    help="Parquet files to predict: a file, a pattern in quotes, or a folder. May be repeated.",
)
@click.option(
    "--out", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Write the predictions here."
)
@click.option(
    "--copy",
    "columns",
    metavar="COLUMN",
    multiple=True,
    help="Copy this column of the data. May be repeated.",
)
@click.option(
    "--batch-rows", type=click.IntRange(min=1), metavar="N", help="Predict N rows at a time (default: 32)."
)
@device_options
@submit_options(set_example="resources.processes=4", again="Predict again")
@click.pass_obj
def command(home: Home, /, *, model: str, **options: Any) -> ExitCode:
    """Predict the rows of parquet files with a checkpoint, and follow the run to its end.

    Each row group of the data becomes one file in DIR, complete or not there.
    """
    import asyncio

    from trn.cli.submitting.submission_report import report_rejection
    from trn.core.errors import ConflictError, InvalidRequestError

    output = Output(is_json=options["is_json"])
    try:
        return asyncio.run(_predict(home, output, model, options))
    except (InvalidRequestError, ConflictError) as fault:
        return report_rejection(output, fault, model)


async def _predict(home: Home, output: Output, model: str, options: dict[str, Any]) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.submitting.submission_report import submit_and_follow
    from trn.client.code.frozen_code import FrozenCode

    prediction: dict[str, Any] = {
        "checkpoint": absolute_model(model),
        "parquet_paths": [_absolute(text) for text in options["data"]],
        "out": _absolute(options["out"]),
    }
    if options["columns"]:
        prediction["columns"] = list(options["columns"])
    if options["batch_rows"] is not None:
        prediction["batch_rows"] = options["batch_rows"]
    config: dict[str, Any] = {"mode": "inference", "prediction": prediction}
    choose_devices(
        config,
        devices=options["devices"],
        count=options["device_count"],
        is_cpu_only=options["is_cpu_only"],
    )
    config = make_model_job(config, options["assignments"])
    asked = read_submit_options(options)
    asked["base_dir"] = Path.cwd()
    home.make()
    async with connected(home) as client:
        request = client.submit(config, **asked)
        code = await submit_and_follow(client, home, output, request, asked, options, FrozenCode())
    if code is ExitCode.OK and not options["is_detached"]:
        output.show(f"  predictions.json in {plain(prediction['out'])} lists the files")
    return code


def _absolute(text: Path | str) -> str:
    return os.path.abspath(Path(text).expanduser())  # noqa: PTH100
