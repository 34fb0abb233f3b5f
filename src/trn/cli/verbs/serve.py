"""`trn serve`: a model server for a checkpoint of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.cli.exit_codes import ExitCode, exit_code_of_state
from trn.cli.output import Output
from trn.cli.reading.registry_view import complete_run_id
from trn.cli.submitting.model_job import absolute_model, choose_devices, device_options, make_model_job
from trn.cli.submitting.submit_options import read_submit_options, submit_options
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.proto.records import Run, SubmitResult

EPILOG = """\b
Examples:
  trn serve mnist
  trn serve mnist@500 --name digits --address 127.0.0.1:8000 --detach
  trn serve mnist --follow --set serving.gate.metric=val/loss
  trn serve mnist --detach --json | jq -r .url

\b
RUN means RUN@best: the checkpoint with the best metric, else the newest. RUN@latest
and RUN@STEP name another, as does the path of a .meta.json.
The server is a run, serve-NAME: `trn cancel serve-NAME` drains and stops it.
`trn promote NAME RUN@STEP` changes the model.
"""


@click.command("serve", epilog=EPILOG)
@click.argument("model", metavar="RUN[@WHICH]", shell_complete=complete_run_id)
@click.option("--name", metavar="NAME", help="The served name (default: the name of the run).")
@click.option(
    "--address",
    metavar="A",
    help="Answer here: HOST:PORT, or unix:PATH (default: a free port of 127.0.0.1).",
)
@click.option("--replicas", type=click.IntRange(min=1), metavar="N", help="Model workers (default: 1).")
@click.option(
    "--follow", "is_following", is_flag=True, help="Promote each better checkpoint of the run by itself."
)
@device_options
@submit_options(set_example="serving.max_batch_rows=64", again="")
@click.pass_obj
def command(home: Home, /, *, model: str, **options: Any) -> ExitCode:
    """Serve a checkpoint of a run over HTTP, and follow the server. Starts a daemon if none runs.

    With --detach it returns once the server answers, and prints where.
    """
    import asyncio

    from trn.core.errors import ConflictError, InvalidRequestError

    output = Output(is_json=options["is_json"])
    try:
        return asyncio.run(_serve(home, output, model, options))
    except (ConflictError, InvalidRequestError) as fault:
        from trn.cli.submitting.submission_report import report_rejection

        code = report_rejection(output, fault, model)
        return ExitCode.CONFLICT if isinstance(fault, ConflictError) else code
    except KeyboardInterrupt:
        output.say("the server is not waited for any more; `trn list` shows it")
        return ExitCode.INTERRUPTED


async def _serve(home: Home, output: Output, model: str, options: dict[str, Any]) -> ExitCode:
    from trn.cli.following.follow import connected

    config = _make_config(home, model, options)
    asked = read_submit_options(options)
    asked["base_dir"] = Path.cwd()
    home.make()
    async with connected(home) as client:
        request = client.submit(config, **asked)
        if options["is_detached"]:
            return await _await_ready(client, home, output, await request)
        from trn.cli.submitting.submission_report import submit_and_follow
        from trn.client.code.frozen_code import FrozenCode

        return await submit_and_follow(client, home, output, request, asked, options, FrozenCode())


def _make_config(home: Home, model: str, options: dict[str, Any]) -> dict[str, Any]:
    serving: dict[str, Any] = {"checkpoint": absolute_model(model)}
    if options["address"] is not None:
        serving["address"] = _absolute_address(options["address"])
    if options["replicas"] is not None:
        serving["replicas"] = options["replicas"]
    if options["is_following"]:
        serving["follow"] = _find_followed(home, serving["checkpoint"])
    config: dict[str, Any] = {"mode": "inference", "serving": serving}
    if options["name"] is not None:
        config["name"] = options["name"]
    choose_devices(
        config,
        devices=options["devices"],
        count=options["device_count"],
        is_cpu_only=options["is_cpu_only"],
    )
    return make_model_job(config, options["assignments"])


def _find_followed(home: Home, model: str) -> str:
    """The family of the run, whose newest run is followed."""
    from trn.cli.following.follow import resolve

    if "/" in model:
        raise click.UsageError("--follow needs a RUN, not the path of a checkpoint")
    return resolve(home, model.partition("@")[0]).family


def _absolute_address(text: str) -> str:
    kind, sign, path = text.partition(":")
    return f"unix:{os.path.abspath(Path(path).expanduser())}" if kind == "unix" and sign and path else text  # noqa: PTH100


async def _await_ready(
    client: "AsyncClient", home: Home, output: Output, submission: "SubmitResult"
) -> ExitCode:
    from trn.cli.following.served import show_served, wait_ready

    for note in submission.notes:
        output.say(f"trn: {plain(note)}")
    served, run = await wait_ready(client, home, output, submission.run)
    if served is not None:
        show_served(output, home, served)
        return ExitCode.OK
    return _report_end(output, run)


def _report_end(output: Output, run: "Run") -> ExitCode:
    """Of a server that ended before it answered."""
    from trn.cli.following.follow import describe

    output.record({"event": f"job_{run.state.lower()}", **describe(run)})
    output.say(f"trn: {run.run_id} {run.state.lower()} before it was ready: {plain(run.reason)}")
    output.say(f"  trn logs {run.run_id}")
    return exit_code_of_state(run.state)
