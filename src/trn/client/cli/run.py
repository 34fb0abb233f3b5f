"""`trn run`: check a job, submit it with its code, and follow it to its end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trn.client.cli.exit_codes import ExitCode
from trn.client.cli.log_options import LogPaths, log_options, read_log_paths
from trn.client.cli.output import Output, json_option
from trn.core.home import Home

if TYPE_CHECKING:
    from trn.client.cli.job_file import Job
    from trn.client.snapshot import Snapshot

EPILOG = """\b
Examples:
  trn run --config job.yaml
  trn run --config job.yaml --profile long --set hyperparams.lr=0.01 --set max_steps=500
  trn run --config job.yaml --device-count 2 --detach
  trn run --config job.yaml --json | jq -c 'select(.event == "validation")'

\b
Ctrl-C asks whether to detach or to cancel, a second one cancels. In a pipe, or
with --json, the first Ctrl-C cancels the run and waits for its end. SIGTERM
detaches: the run goes on.
"""


@click.command("run", epilog=EPILOG, short_help="Train a job: check it, submit it, follow it to its end.")
@click.option(
    "--config",
    "-c",
    required=True,
    metavar="C",
    type=click.Path(path_type=Path, readable=False),  # a fault of the job like any other
    help="The job: YAML, TOML or JSON.",
)
@click.option(
    "--weights",
    metavar="META",
    type=click.Path(path_type=Path),
    help="Weights to begin with, as `weights` of the job.",
)
@click.option("--profile", metavar="P", help="Lay one of the job's `profiles` over it.")
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
@click.option(
    "--code",
    "code_dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Freeze the code of this folder (default: the config's, where it is in a git work tree).",
)
@click.option(
    "--no-snapshot", "is_unfrozen", is_flag=True, help="Train the code that is there when the run starts."
)
@log_options
@click.option("--another", "is_another", is_flag=True, help="A new run, also where an equal one exists.")
@click.option("--detach", "-d", "is_detached", is_flag=True, help="Print the run's id, do not follow it.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Check everything, show what would be started.")
@json_option
@click.pass_obj
def command(home: Home, /, *, config: Path, **options: Any) -> ExitCode:
    """Check a job, submit it, and follow it to its end. A daemon is started where none runs."""
    import asyncio

    from trn.client.cli.submission_report import report_rejection
    from trn.core.errors import InvalidRequestError

    if options["code_dir"] is not None and options["is_unfrozen"]:
        raise click.UsageError("--code and --no-snapshot exclude each other")
    output = Output(is_json=options["is_json"])
    try:
        job, paths = _read(config, options, home), read_log_paths(options, home)
        for warning in job.warnings:
            output.say(f"trn: {warning}")
        return asyncio.run(_run(home, output, job, paths, options))
    except InvalidRequestError as fault:
        return report_rejection(output, fault, str(config))


def _read(config: Path, options: dict[str, Any], home: Home) -> "Job":
    from trn.client.cli.job_file import Changes, read_job

    changes = Changes(
        profile=options["profile"],
        assignments=options["assignments"],
        name=options["name"],
        weights=options["weights"],
        devices=options["devices"],
        device_count=options["device_count"],
        is_cpu_only=options["is_cpu_only"],
        is_another=options["is_another"],
    )
    return read_job(config, changes, home=home)


async def _run(home: Home, output: Output, job: "Job", paths: LogPaths, options: dict[str, Any]) -> ExitCode:
    import asyncio

    from trn.client.cli.follow import connected
    from trn.client.cli.submission_report import read_faults, report_and_follow, say_snapshot
    from trn.client.daemon_start import find_daemon
    from trn.core.errors import InvalidRequestError

    if job.faults and find_daemon(home) is None:
        job.require_sound()  # no daemon is started for what cannot be
    home.make()
    code_dir = None if options["is_unfrozen"] else options["code_dir"] or _find_code(job.base_dir)
    freezing = asyncio.ensure_future(asyncio.to_thread(_freeze, home, code_dir))
    try:
        async with connected(home) as client:
            snapshot = await freezing  # meanwhile a daemon may have started
            if snapshot is not None and not job.faults:
                say_snapshot(output, snapshot)
            is_dry_run = options["is_dry_run"] or bool(job.faults)
            try:
                submission = await client.submit(
                    job.config,
                    base_dir=job.base_dir,
                    snapshot=snapshot.digest if snapshot else "",
                    priority=options["priority"],
                    is_another_wanted=options["is_another"] and not is_dry_run,
                    is_dry_run=is_dry_run,
                    is_import_tried=True,
                    log_dir=paths.log_dir,
                    event_log=paths.event_log,
                )
            except InvalidRequestError as fault:
                if job.faults:
                    job.require_sound(*read_faults(fault))
                raise
            job.require_sound()
            if options["is_dry_run"]:
                return _show_plan(output, submission.plan or {})
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


def _find_code(base_dir: Path) -> Path | None:
    """The folder, if it is in a git work tree: elsewhere nothing says what of it is code."""
    return base_dir if any((folder / ".git").exists() for folder in (base_dir, *base_dir.parents)) else None


def _freeze(home: Home, code_dir: Path | None) -> "Snapshot | None":
    if code_dir is None:
        return None
    from trn.client.snapshot import take_snapshot
    from trn.core.settings import read_settings

    return take_snapshot(code_dir, home, max_bytes=read_settings(home.settings).max_snapshot_bytes)


def _show_plan(output: Output, plan: dict[str, Any]) -> ExitCode:
    output.event("job_checked", **plan)
    output.show("the job is valid; nothing was submitted. It would be started as")
    output.show(str(plan.get("shell", plan)))
    return ExitCode.OK
