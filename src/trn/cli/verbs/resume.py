"""`trn resume`: continue a run or a checkpoint exactly, as a new run."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output
from trn.cli.reading.registry_view import complete_run_id
from trn.cli.submitting.submit_options import read_submit_options, submit_options
from trn.client.code.frozen_code import FrozenCode, find_changed_files, freeze, listed
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.client.wire_requests import ResumeOptions
    from trn.core.runs import RunRecord

EPILOG = """\b
Examples:
  trn resume mnist-2b53
  trn resume mnist-2b53 --set max_steps=2000
  trn resume mnist-2b53@500 --set hyperparams.lr=0.01
  trn resume mnist-2b53 --code .
  trn resume --checkpoint step-00000500.meta.json --config job.yaml
"""


@click.command("resume", epilog=EPILOG)
@click.argument("run_id", metavar="[RUN[@STEP]]", required=False, shell_complete=complete_run_id)
@click.option(
    "--checkpoint",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Start from this checkpoint (default: the run's newest that is complete and finite).",
)
@click.option(
    "--config",
    "-c",
    metavar="C",
    type=click.Path(path_type=Path, readable=False),
    help="The job to continue with (default: that of the run that saved the checkpoint).",
)
@submit_options(code_default="the run's own; with --config as `trn run`")
@click.option(
    "--force", "is_forced", is_flag=True, help="Also take a checkpoint with NaN or infinite weights."
)
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
    """Continue a run or a checkpoint as a new run, bit-exactly."""
    import asyncio

    from trn.cli.submitting.submission_report import report_rejection
    from trn.core.errors import InvalidRequestError

    if run_id is None and checkpoint is None:
        raise click.UsageError("name a RUN, or a checkpoint with --checkpoint META")
    if config is not None and (run_id is not None or checkpoint is None):
        raise click.UsageError(
            "--config needs --checkpoint and no RUN: a run continues with its own job; change it with --set"
        )
    output = Output(is_json=options["is_json"])
    if run_id is not None and "@" in run_id:
        if checkpoint is not None:
            raise click.UsageError("RUN@STEP and --checkpoint name a checkpoint each: give one of them")
        run_id, _, step = run_id.partition("@")
        if not step.isdecimal():
            raise click.UsageError(
                f"{step!r} is no step: RUN@STEP continues from the checkpoint of that step"
            )
        checkpoint = _find_step(home, run_id, int(step))
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
    import asyncio

    from trn.cli.following.follow import connected
    from trn.cli.submitting.submission_report import submit_and_follow

    asked = cast("ResumeOptions", read_submit_options(options))
    asked["is_forced"] = options["is_forced"]
    checkpoint = None if given is None else find_checkpoint(given)
    parent = None if config is not None else _find_run(home, run_id, checkpoint)
    asked["checkpoint_path"] = "" if checkpoint is None else checkpoint.path
    async with connected(home) as client:
        if parent is None:
            assert config is not None
            code = await asyncio.to_thread(_read_config, home, config, asked, options)
        else:
            code = await asyncio.to_thread(_read_run, home, output, parent, asked, options)
            asked["is_exact"] = not run_id
            # As it was typed: if the newest run of a family is this very resume, it answers.
            run_id = run_id or parent.run_id
        asked.update(cast("ResumeOptions", code.options))
        return await submit_and_follow(
            client, home, output, client.resume(run_id, **asked), asked, options, code
        )


def _find_step(home: Home, run_id: str, step: int) -> Path:
    """The meta of a run's checkpoint. NotFoundError names the steps that there are."""
    from gen_worker.contract.checkpoints.choice import scan
    from trn.cli.following.follow import resolve
    from trn.core.errors import NotFoundError

    run = resolve(home, run_id)
    infos = [info for info in scan(home.run(run.run_id).checkpoints)[0] if info.meta.run_id == run.run_id]
    found = next((info for info in infos if info.step == step), None)
    if found is None:
        steps = ", ".join(map(str, sorted({info.step for info in infos}))) or "none"
        raise NotFoundError(
            f"run {run.run_id} has no checkpoint of step {step}: it has {steps}{_say_ancestor(home, run, step)}"
        )
    return found.meta_path


def _say_ancestor(home: Home, run: "RunRecord", step: int) -> str:
    """The run whose checkpoint of that step led to this one; empty where there is none."""
    from gen_worker.contract.checkpoints.choice import scan
    from trn.cli.following.follow import resolve
    from trn.core.errors import NotFoundError

    while run.parent_run_id and step <= run.start_step:
        try:
            run = resolve(home, run.parent_run_id, is_exact=True)
        except NotFoundError:
            break
        infos = scan(home.run(run.run_id).checkpoints)[0]
        if any(info.step == step and info.meta.run_id == run.run_id for info in infos):
            typed = f"{run.run_id}.1" if run.run_id == run.family else run.run_id
            return f"; {typed}@{step} is the one of {run.run_id}, which led to it"
    return ""


def _find_run(home: Home, run_id: str, checkpoint: "FoundCheckpoint | None") -> "RunRecord":
    from trn.cli.following.follow import resolve
    from trn.core.errors import NotFoundError

    if run_id:
        return resolve(home, run_id)
    assert checkpoint is not None
    if not checkpoint.saved_by:
        raise NotFoundError(f"{checkpoint.path} names no run: give its job with --config")
    try:
        return resolve(home, checkpoint.saved_by, is_exact=True)
    except NotFoundError:
        raise NotFoundError(
            f"{checkpoint.path} was saved by run {checkpoint.saved_by}, which is not in {home.root}: give its job with"
            " --config"
        ) from None


def _read_run(
    home: Home, output: Output, parent: "RunRecord", asked: "ResumeOptions", options: dict[str, Any]
) -> FrozenCode:
    """The changes to a run's own job, and its code. Blocks."""
    from trn.client.job_file import read_assignments

    asked["overrides"] = read_assignments(options["assignments"])
    base_dir = Path(parent.base_dir or "/")
    if options["code_dir"] is not None:
        return freeze(home, base_dir, code_dir=options["code_dir"], env_files=options["env_files"])
    if parent.snapshot:
        folder = Path(parent.frozen_from or base_dir)
        if changed := find_changed_files(home, folder, parent.snapshot):
            output.say(
                f"trn: files in {folder} have changed since {parent.run_id} was submitted: {listed(changed)}\n"
                f"  this run uses the old ones; --code {folder} uses the new ones"
            )
    return FrozenCode()


def _read_config(home: Home, config: Path, asked: "ResumeOptions", options: dict[str, Any]) -> FrozenCode:
    """The job of a checkpoint without a run, and its code. Blocks."""
    import sys

    from trn.client.job_file import Changes, find_doubled, read_job

    job = read_job(config, Changes(assignments=options["assignments"]))
    starts = dict.fromkeys(("resume_checkpoint_path", "inputs.resume_checkpoint_ref"), "--checkpoint")
    job.require_sound(*find_doubled(options["assignments"], starts))
    asked.update({"config": job.config, "base_dir": job.base_dir, "interpreter": sys.executable})
    return freeze(home, job.base_dir, code_dir=options["code_dir"], env_files=options["env_files"])


class FoundCheckpoint(NamedTuple):
    """Its `.meta.json`, or a plain state; `saved_by` is empty where it names no run."""

    path: Path
    saved_by: str


def find_checkpoint(given: Path) -> FoundCheckpoint:
    """By its meta, its data file, or a plain `{"state": …}` document. The worker verifies the data."""
    from gen_worker.contract.checkpoints.choice import META_SUFFIX, read_named, say_no_checkpoint
    from gen_worker.errors import CheckpointError
    from trn.core.errors import InvalidRequestError, NotFoundError

    path = given.absolute()
    meta = path.with_name(f"{path.stem}{META_SUFFIX}")
    if not path.name.endswith(META_SUFFIX) and meta.is_file():
        path = meta
    if not path.is_file():
        raise NotFoundError(say_no_checkpoint(path))
    try:
        found = read_named(path)
    except CheckpointError as fault:
        raise InvalidRequestError(
            f"{path} cannot be resumed: expected an intact {META_SUFFIX}, or a document with a `state`",
            [str(fault)],
        ) from fault
    return FoundCheckpoint(path, "") if isinstance(found, dict) else FoundCheckpoint(path, found.meta.run_id)
