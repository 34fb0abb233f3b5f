"""`trn resume`: go on exactly where a run or a checkpoint stopped, as a new run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.client.cli.exit_codes import ExitCode
from trn.client.cli.log_options import LogPaths, log_options, read_log_paths
from trn.client.cli.output import Output, json_option, say
from trn.client.cli.registry_view import complete_run_id
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.proto.records import Submission

META_SUFFIX = ".meta.json"
EPILOG = """\b
Examples:
  trn resume mnist-2b53
  trn resume mnist-2b53 --set max_steps=2000
  trn resume --checkpoint step-00000500.meta.json --config job.yaml
"""


@click.command("resume", epilog=EPILOG, short_help="Go on from a checkpoint, or from a run that stopped.")
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=complete_run_id)
@click.option(
    "--checkpoint",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Begin at this checkpoint (default: the run's newest that is whole).",
)
@click.option(
    "--config",
    "-c",
    metavar="C",
    type=click.Path(path_type=Path, readable=False),
    help="The job to go on with (default: that of the run which saved the checkpoint).",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field, for example max_steps=2000.",
)
@click.option("--priority", type=int, default=0, metavar="N", help="Higher starts first (default: 0).")
@log_options
@click.option("--another", "is_another", is_flag=True, help="A new run, also where an equal one exists.")
@click.option("--detach", "-d", "is_detached", is_flag=True, help="Print the run's id, do not follow it.")
@json_option
@click.pass_obj
def command(
    home: Home,
    /,
    *,
    run_id: str | None,
    checkpoint: Path | None,
    config: Path | None,
    **options: Any,
) -> ExitCode:
    """Go on where a run or a checkpoint stopped: a new run, to the bit as if nothing had happened."""
    import asyncio

    from trn.client.cli.submission_report import report_rejection
    from trn.core.errors import InvalidRequestError

    if run_id is None and checkpoint is None:
        raise click.UsageError("name a RUN, or a checkpoint with --checkpoint META")
    if config is not None and (run_id is not None or checkpoint is None):
        raise click.UsageError(
            "--config goes with --checkpoint alone: a run goes on with its own; change it with --set"
        )
    output = Output(is_json=options["is_json"])
    try:
        return asyncio.run(_resume(home, output, run_id or "", checkpoint, config, options))
    except InvalidRequestError as fault:
        return report_rejection(output, fault, str(checkpoint or run_id))


async def _resume(
    home: Home,
    output: Output,
    run_id: str,
    checkpoint: Path | None,
    config: Path | None,
    options: dict[str, Any],
) -> ExitCode:
    from trn.client.cli.follow import connected
    from trn.client.cli.submission_report import report_and_follow

    paths = read_log_paths(options, home)
    saved_by = ""
    if checkpoint is not None:
        checkpoint, saved_by = find_checkpoint(checkpoint)
    if config is None:
        run_id = _find_run(home, run_id, checkpoint, saved_by)
    async with connected(home) as client:
        if config is not None:
            assert checkpoint is not None
            submission = await _resume_config(home, client, checkpoint, config, paths, options)
        else:
            submission = await _resume_run(client, run_id, checkpoint, paths, options)
        paths.say_kept(output, submission)
        return await report_and_follow(
            client,
            home,
            output,
            submission,
            is_detached=options["is_detached"],
            is_json=options["is_json"],
        )


def _find_run(home: Home, run_id: str, checkpoint: Path | None, saved_by: str) -> str:
    from trn.client.cli.follow import resolve
    from trn.core.errors import NotFoundError

    try:
        return resolve(home, run_id or saved_by).run_id
    except NotFoundError:
        if run_id:
            raise
        raise NotFoundError(
            f"{checkpoint} was saved by run {saved_by}, which {home.root} does not know: name its job with --config"
        ) from None


async def _resume_run(
    client: "AsyncClient", run_id: str, checkpoint: Path | None, paths: LogPaths, options: dict[str, Any]
) -> "Submission":
    from trn.client.cli.job_file import read_assignments

    return await client.resume(
        run_id,
        checkpoint_path=checkpoint or "",
        overrides=read_assignments(options["assignments"]),
        priority=options["priority"],
        is_another_wanted=options["is_another"],
        is_import_tried=True,
        log_dir=paths.log_dir,
        event_log=paths.event_log,
    )


async def _resume_config(
    home: Home,
    client: "AsyncClient",
    checkpoint: Path,
    config: Path,
    paths: LogPaths,
    options: dict[str, Any],
) -> "Submission":
    import sys

    from trn.client.cli.job_file import Changes, read_job

    # Checked as it will be: its checkpoints are as large as this one.
    assignments = [*options["assignments"], f"resume_checkpoint_path={checkpoint}"]
    job = read_job(config, Changes(assignments=assignments, is_another=options["is_another"]), home=home)
    job.require_sound()
    for warning in job.warnings:
        say(f"trn: {warning}")
    return await client.resume(
        checkpoint_path=checkpoint,
        config=job.config,
        base_dir=job.base_dir,
        priority=options["priority"],
        is_another_wanted=options["is_another"],
        interpreter=sys.executable,
        is_import_tried=True,
        log_dir=paths.log_dir,
        event_log=paths.event_log,
    )


def find_checkpoint(given: Path) -> tuple[Path, str]:
    """(its meta, the run that saved it). The daemon verifies its files."""
    import msgspec

    from trn.core.errors import InvalidRequestError, NotFoundError

    path = given.absolute()
    if not path.name.endswith(META_SUFFIX):
        path = path.with_name(f"{path.stem}{META_SUFFIX}")
    try:
        meta = msgspec.json.decode(path.read_bytes())
    except OSError as fault:
        raise NotFoundError(f"there is no checkpoint {path}: {fault.strerror}") from fault
    except msgspec.MsgspecError as fault:
        raise InvalidRequestError(f"{path} is no checkpoint: {fault}") from fault
    saved_by = meta.get("run_id") if isinstance(meta, dict) else None
    if not isinstance(saved_by, str) or not saved_by:
        raise InvalidRequestError(f"{path} is no checkpoint: it names no run")
    return path, saved_by
