"""`trn resume`: go on exactly where a run or a checkpoint stopped, as a new run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.reading.registry_view import complete_run_id
from trn.cli.submitting.environment_options import environment_options, read_variables
from trn.cli.submitting.frozen_code import FrozenCode, code_option, find_changed_files, freeze, listed
from trn.cli.submitting.log_options import LogPaths, log_options, read_log_paths
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.client.caller_environment import GivenVariables
    from trn.client.client import AsyncClient
    from trn.core.runs import RunRecord
    from trn.proto.records import SubmitResult

EPILOG = """\b
Examples:
  trn resume mnist-2b53
  trn resume mnist-2b53 --set max_steps=2000
  trn resume mnist-2b53 --code .
  trn resume --checkpoint step-00000500.meta.json --config job.yaml
"""


@click.command("resume", epilog=EPILOG, short_help="Go on from a checkpoint, or from a run that stopped.")
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=complete_run_id)
@click.option(
    "--checkpoint",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Begin at this checkpoint (default: the run's newest that is whole and finite).",
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
@code_option("the run's own; with --config as `trn run`")
@click.option("--priority", type=int, default=0, metavar="N", help="Higher starts first (default: 0).")
@environment_options
@log_options
@click.option(
    "--force", "is_forced", is_flag=True, help="Take a checkpoint whose weights are NaN or infinite, too."
)
@click.option(
    "--another", "is_another", is_flag=True, help="Train anew, also where an equal run is alive or complete."
)
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

    from trn.cli.submitting.submission_report import report_rejection
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
    given: Path | None,
    config: Path | None,
    options: dict[str, Any],
) -> ExitCode:
    from trn.cli.following.follow import connected
    from trn.cli.submitting.submission_report import answered, report_and_follow, say_answer

    paths, variables = read_log_paths(options), read_variables(options)
    checkpoint = None if given is None else find_checkpoint(given)
    parent = None
    if config is None:
        parent = _find_run(home, run_id, checkpoint)
    async with connected(home) as client:
        if parent is None:
            assert config is not None
            assert checkpoint is not None
            request = _resume_config(home, output, client, checkpoint.path, config, paths, variables, options)
        else:
            path = None if checkpoint is None else checkpoint.path
            request = _resume_run(home, output, client, run_id, parent, path, paths, variables, options)
        with output.holding_lines():
            submission = await answered(output, request)
            say_answer(output, submission)
        paths.say_kept(output, submission)
        return await report_and_follow(
            client,
            home,
            output,
            submission,
            is_detached=options["is_detached"],
            is_json=options["is_json"],
        )


def _find_run(home: Home, run_id: str, checkpoint: "FoundCheckpoint | None") -> "RunRecord":
    from trn.cli.following.follow import resolve
    from trn.core.errors import NotFoundError

    if run_id:
        return resolve(home, run_id)
    assert checkpoint is not None
    if not checkpoint.saved_by:
        raise NotFoundError(f"{checkpoint.path} does not say which run saved it: name its job with --config")
    try:
        return resolve(home, checkpoint.saved_by, is_exact=True)
    except NotFoundError:
        raise NotFoundError(
            f"{checkpoint.path} was saved by run {checkpoint.saved_by}, which {home.root} does not know: name its job"
            " with --config"
        ) from None


async def _resume_run(
    home: Home,
    output: Output,
    client: "AsyncClient",
    run_id: str,
    parent: "RunRecord",
    checkpoint: Path | None,
    paths: LogPaths,
    variables: "GivenVariables",
    options: dict[str, Any],
) -> "SubmitResult":
    import asyncio

    from trn.cli.submitting.job_file import read_assignments

    overrides = read_assignments(options["assignments"])
    base_dir, code = Path(parent.base_dir or "/"), FrozenCode()
    if options["code_dir"] is not None:
        code = await asyncio.to_thread(
            freeze, home, base_dir, code_dir=options["code_dir"], env_files=options["env_files"]
        )
        code.say(output)
    elif parent.snapshot:
        folder = Path(parent.frozen_from or base_dir)
        changed = await asyncio.to_thread(find_changed_files, home, folder, parent.snapshot)
        if changed:
            output.say(
                f"trn: files in {folder} have changed since {parent.run_id} was submitted: {listed(changed)}\n"
                f"  this run uses them as they were then; --code {folder} takes them as they are now"
            )
    return await client.resume(
        run_id
        or parent.run_id,  # as it was typed: a family whose newest run is this very resume is answered by it
        checkpoint_path=checkpoint or "",
        overrides=overrides,
        snapshot=code.digest,
        frozen_from=code.folder,
        priority=options["priority"],
        force_new=options["is_another"],
        is_import_tried=True,
        is_forced=options["is_forced"],
        env=variables.env,
        secret_env=variables.secret_env,
        log_dir=paths.log_dir,
        event_log=paths.event_log,
        is_exact=not run_id,
    )


async def _resume_config(
    home: Home,
    output: Output,
    client: "AsyncClient",
    checkpoint: Path,
    config: Path,
    paths: LogPaths,
    variables: "GivenVariables",
    options: dict[str, Any],
) -> "SubmitResult":
    import asyncio
    import sys

    from trn.cli.submitting.job_file import Changes, read_job

    job = read_job(config, Changes(assignments=options["assignments"]))
    job.require_sound()
    code = await asyncio.to_thread(
        freeze, home, job.base_dir, code_dir=options["code_dir"], env_files=options["env_files"]
    )
    code.say(output)
    return await client.resume(
        checkpoint_path=checkpoint,
        config=job.config,
        base_dir=job.base_dir,
        snapshot=code.digest,
        frozen_from=code.folder,
        priority=options["priority"],
        force_new=options["is_another"],
        interpreter=sys.executable,
        is_import_tried=True,
        is_forced=options["is_forced"],
        env=variables.env,
        secret_env=variables.secret_env,
        log_dir=paths.log_dir,
        event_log=paths.event_log,
    )


class FoundCheckpoint(NamedTuple):
    """Its `.meta.json`, or a plain state; `saved_by` is empty where it names no run."""

    path: Path
    saved_by: str


def find_checkpoint(given: Path) -> FoundCheckpoint:
    """By its meta, its data file, or a plain `{"state": …}` document. The worker verifies the bytes of its data."""
    from gen_worker.contract.checkpoints.choice import META_SUFFIX, read_named
    from gen_worker.errors import CheckpointError
    from trn.core.errors import InvalidRequestError, NotFoundError

    path = given.absolute()
    meta = path.with_name(f"{path.stem}{META_SUFFIX}")
    if not path.name.endswith(META_SUFFIX) and meta.is_file():
        path = meta
    if not path.is_file():
        raise NotFoundError(f"there is no checkpoint {path}")
    try:
        found = read_named(path)
    except CheckpointError as fault:
        raise InvalidRequestError(
            f"{path} is no checkpoint: expected the {META_SUFFIX} of one, or a document with a `state`",
            [str(fault)],
        ) from fault
    return FoundCheckpoint(path, "") if isinstance(found, dict) else FoundCheckpoint(path, found.meta.run_id)
