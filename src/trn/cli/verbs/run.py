"""`trn run`: check a job, submit it with its code, and follow it to its end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.cli.completion import complete_profile
from trn.cli.exit_codes import ExitCode
from trn.cli.output import Output, json_option
from trn.cli.submitting.environment_options import environment_options, read_variables, say_differences
from trn.cli.submitting.frozen_code import FrozenCode, code_option, freeze
from trn.cli.submitting.log_options import LogPaths, log_options, read_log_paths
from trn.core.home import Home
from trn.core.terminal_text import plain

if TYPE_CHECKING:
    from gen_worker.errors import Fault
    from trn.cli.submitting.job_file import Job
    from trn.client.caller_environment import GivenVariables
    from trn.client.wire_requests import SubmitOptions
    from trn.proto.records import JobCheck

JOB_PATH = click.Path(
    path_type=Path, readable=False
)  # what cannot be read is a fault of the job like any other

EPILOG = """\b
Examples:
  trn run job.yaml
  trn run job.yaml --profile long --set hyperparams.lr=0.01 --set max_steps=500
  trn run my_trainer:MyTrainer --set max_steps=100 --set mock_batches=[0]
  trn run job.yaml --device-count 2 --detach
  trn run job.yaml --json | jq -c 'select(.event == "validation")'

\b
Ctrl-C asks whether to detach or to cancel, a second one cancels. In a pipe, or
with --json, the first Ctrl-C cancels the run and waits for its end. SIGTERM
detaches: the run goes on.
"""


@click.command("run", epilog=EPILOG, short_help="Train a job: check it, submit it, follow it to its end.")
@click.argument("job", metavar="[JOB]", required=False, type=JOB_PATH)
@click.option(
    "--config", "-c", metavar="C", type=JOB_PATH, help="The job: YAML, TOML or JSON. The same as JOB."
)
@click.option(
    "--weights",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Weights to begin with, as `weights` of the job.",
)
@click.option(
    "--profile", metavar="P", shell_complete=complete_profile, help="Lay one of the job's `profiles` over it."
)
@click.option("--devices", metavar="D,…", help="These devices, for example cuda:0,cuda:1.")
@click.option("--device-count", type=click.IntRange(min=1), metavar="N", help="Any N GPUs.")
@click.option("--cpu-only", "is_cpu_only", is_flag=True, help="No GPU.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a field, for example hyperparams.lr=0.1.",
)
@click.option("--name", metavar="TEXT", help="What people call the run.")
@click.option("--priority", type=int, default=0, metavar="N", help="Higher starts first (default: 0).")
@code_option("the config's, unless it holds far more than code")
@click.option(
    "--no-snapshot", "is_unfrozen", is_flag=True, help="Train the code that is there when the run starts."
)
@environment_options
@log_options
@click.option(
    "--another", "is_another", is_flag=True, help="Train anew, also where an equal run is alive or complete."
)
@click.option("--detach", "-d", "is_detached", is_flag=True, help="Print the run's id, do not follow it.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Check everything, show what would be started.")
@json_option
@click.pass_obj
def command(home: Home, /, *, job: Path | None, config: Path | None, **options: Any) -> ExitCode:
    """Check a job, submit it, and follow it to its end. A daemon is started where none runs.

    JOB is a file, or a trainer class as module:Symbol, which takes the rest of its job from --set.
    """
    import asyncio

    from trn.cli.submitting.submission_report import report_rejection
    from trn.core.errors import ConflictError, InvalidRequestError

    if options["code_dir"] is not None and options["is_unfrozen"]:
        raise click.UsageError("--code and --no-snapshot exclude each other")
    path = _one_of(job, config)
    output = Output(is_json=options["is_json"])
    try:
        found, paths, variables = _read(path, options), read_log_paths(options), read_variables(options)
        return asyncio.run(_run(home, output, found, paths, variables, options))
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


def _read(config: Path, options: dict[str, Any]) -> "Job":
    from trn.cli.submitting.job_file import Changes, read_job

    changes = Changes(
        profile=options["profile"],
        assignments=options["assignments"],
        name=options["name"],
        weights=options["weights"],
        devices=options["devices"],
        device_count=options["device_count"],
        is_cpu_only=options["is_cpu_only"],
    )
    return read_job(config, changes)


async def _run(
    home: Home,
    output: Output,
    job: "Job",
    paths: LogPaths,
    variables: "GivenVariables",
    options: dict[str, Any],
) -> ExitCode:
    import asyncio

    from trn.cli.following.follow import connected
    from trn.cli.submitting.submission_report import answered, report_and_follow, say_answer

    if job.faults:
        job.require_sound(*await _find_further_faults(home, job, options))
    home.make()
    freezing = asyncio.ensure_future(asyncio.to_thread(_freeze, home, job.base_dir, options))
    try:
        async with connected(home) as client:
            code = await freezing  # meanwhile a daemon may have started
            asked: SubmitOptions = {
                "base_dir": job.base_dir,
                "snapshot": code.digest,
                "frozen_from": code.folder,
                "priority": options["priority"],
                "is_import_tried": True,
                "log_dir": paths.log_dir,
                "event_log": paths.event_log,
                "env": variables.env,
                "secret_env": variables.secret_env,
            }
            if options["is_dry_run"]:
                code.say(output)
                return _show_check(output, await answered(output, client.check(job.config, **asked)))
            asked["force_new"] = options["is_another"]
            with output.holding_lines():
                code.say(output)
                submission = await answered(output, client.submit(job.config, **asked))
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
    finally:
        freezing.cancel()


async def _find_further_faults(home: Home, job: "Job", options: dict[str, Any]) -> "list[Fault]":
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
            checked = await client.check(
                job.config,
                base_dir=job.base_dir,
                snapshot=code.digest,
                frozen_from=code.folder,
                is_import_tried=True,
            )
            return list(checked.faults)
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
