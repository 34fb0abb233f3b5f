"""`trn run`: check a job, submit it with its code, and follow it to its end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.cli.completion import complete_profile
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output
from trn.cli.submitting.submit_options import read_submit_options, say_differences, submit_options
from trn.client.code.frozen_code import FrozenCode, freeze
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from gen_worker.errors import Fault
    from trn.client.job_file import Job
    from trn.client.wire_requests import SubmitOptions
    from trn.proto.records import JobCheck

JOB_PATH = click.Path(
    path_type=Path, readable=False
)  # a file that cannot be read is reported as a fault of the job

EPILOG = """\b
Examples:
  trn run job.yaml
  trn run job.yaml --profile long --set hyperparams.lr=0.01 --set max_steps=500
  trn run my_trainer:MyTrainer --set max_steps=100 --set mock_batches=[0]
  trn run job.yaml --device-count 2 --detach
  trn run job.yaml --json | jq -c 'select(.event == "validation")'

\b
Ctrl-C asks whether to detach or to cancel; a second Ctrl-C cancels. In a pipe,
or with --json, the first Ctrl-C cancels the run and waits for its end. SIGTERM
detaches: the run continues.
"""


@click.command("run", epilog=EPILOG)
@click.argument("job", metavar="[JOB]", required=False, type=JOB_PATH)
@click.option(
    "--config", "-c", metavar="C", type=JOB_PATH, help="The job: YAML, TOML or JSON. The same as JOB."
)
@click.option(
    "--weights",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Initial weights, as `weights` of the job.",
)
@click.option(
    "--profile", metavar="P", shell_complete=complete_profile, help="Apply one of the job's `profiles`."
)
@click.option("--devices", metavar="D,…", help="Use these devices, for example cuda:0,cuda:1.")
@click.option("--device-count", type=click.IntRange(min=1), metavar="N", help="Use any N GPUs.")
@click.option("--cpu-only", "is_cpu_only", is_flag=True, help="Use no GPU.")
@click.option("--name", metavar="TEXT", help="A name for the run.")
@click.option(
    "--no-snapshot", "is_unfrozen", is_flag=True, help="Train the code as it is on disk when the run starts."
)
@submit_options(code_default="the config's, unless it is large and not in git")
@click.option(
    "--dry-run", "is_dry_run", is_flag=True, help="Check everything and show what would be started."
)
@click.pass_obj
def command(home: Home, /, *, job: Path | None, config: Path | None, **options: Any) -> ExitCode:
    """Check a job, submit it, and follow it to its end. Starts a daemon if none runs.

    JOB is a file, or a trainer class as module:Symbol, whose job is given with --set.
    """
    import asyncio

    from trn.cli.submitting.submission_report import report_rejection
    from trn.core.errors import ConflictError, InvalidRequestError

    if options["code_dir"] is not None and options["is_unfrozen"]:
        raise click.UsageError("--code and --no-snapshot exclude each other")
    path = _one_of(job, config)
    output = Output(is_json=options["is_json"])
    try:
        return asyncio.run(_run(home, output, _read(path, options), read_submit_options(options), options))
    except (InvalidRequestError, ConflictError) as fault:
        return report_rejection(output, fault, str(path))


def _one_of(job: Path | None, config: Path | None) -> Path:
    if job is not None and config is not None:
        raise click.UsageError(f"the job is given twice: {job} and --config {config}")
    path = job or config
    if path is None:
        raise click.UsageError(
            "no job is given: `trn run job.yaml`, or `trn run module:Symbol --set max_steps=100`"
        )
    return path


def _read(path: Path, options: dict[str, Any]) -> "Job":
    from trn.client.job_file import Changes, read_job

    return read_job(path, Changes(**{name: options[name] for name in Changes.__slots__}))


async def _run(
    home: Home, output: Output, job: "Job", asked: "SubmitOptions", options: dict[str, Any]
) -> ExitCode:
    import asyncio

    from trn.cli.following.follow import connected
    from trn.cli.submitting.submission_report import answered, submit_and_follow

    asked["base_dir"] = job.base_dir
    if job.faults:
        job.require_sound(*await _find_further_faults(home, job, asked, options))
    home.make()
    freezing = asyncio.ensure_future(asyncio.to_thread(_freeze, home, job.base_dir, options))
    try:
        async with connected(home) as client:
            code = await freezing  # in parallel to the start of a daemon
            asked.update(code.options)
            if options["is_dry_run"]:
                for line in code.lines():
                    output.say(line)
                return _show_check(output, await answered(output, client.check(job.config, **asked)))
            request = client.submit(job.config, **asked)
            return await submit_and_follow(client, home, output, request, asked, options, code)
    finally:
        freezing.cancel()


async def _find_further_faults(
    home: Home, job: "Job", asked: "SubmitOptions", options: dict[str, Any]
) -> "list[Fault]":
    """What a running daemon finds in a job that is refused anyway; none is started for it."""
    import asyncio

    from trn.cli.following.follow import connected
    from trn.client.daemon_start import find_daemon
    from trn.core.errors import TrnError

    if find_daemon(home) is None:
        return []
    try:
        code = await asyncio.to_thread(_freeze, home, job.base_dir, options)
        async with connected(home) as client:
            asked.update(code.options)
            return list((await client.check(job.config, **asked)).faults)
    except TrnError:  # the daemon's problem, not the job's
        return []


def _freeze(home: Home, base_dir: Path, options: dict[str, Any]) -> FrozenCode:
    if options["is_unfrozen"]:
        return FrozenCode()
    return freeze(home, base_dir, code_dir=options["code_dir"], env_files=options["env_files"])


def _show_check(output: Output, check: "JobCheck") -> ExitCode:
    from trn.core.errors import InfeasibleError, InvalidRequestError

    if check.faults:
        refusal = InfeasibleError if check.code == "infeasible" else InvalidRequestError
        raise refusal(check.reason, check.faults)
    say_differences(output, check.env_differences)
    plan = check.plan or {}
    for note in check.notes:
        output.say(f"trn: {plain(note)}")
    output.event("job_checked", **plan)
    output.show("the job is valid; nothing was submitted. It would be started as")
    output.show(str(plan.get("shell", plan)))
    return ExitCode.OK
