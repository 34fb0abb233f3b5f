"""The options that `trn run` and `trn resume` share, and what they become for the client."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trn.cli.output import json_option
from trn.core.variables import DEVICE_VARIABLES

if TYPE_CHECKING:
    from trn.cli.output import Output
    from trn.client.wire_requests import SubmitOptions
    from trn.proto.records import EnvDifference, SubmitResult

C = TypeVar("C", bound=Callable[..., Any])
MAX_SHOWN = 40  # characters of a value
TARGETS = (("--log-dir", "log_dir", "folder"), ("--event-log", "event_log", "file"))


def submit_options(
    *, code_default: str = "", set_example: str = "hyperparams.lr=0.1", again: str = "Train again"
) -> Callable[[C], C]:
    """Adds them to a command; `code_default` says which code is trained without `--code`, empty: there is no such option.

    `again` is what `--another` does; empty: there is no such option.
    """
    code = click.option(
        "--code",
        "code_dir",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help=f"Take a snapshot of the code in this folder (default: {code_default}).",
    )
    another = click.option(
        "--another", "force_new", is_flag=True, help=f"{again}, even if an equal run is alive or complete."
    )
    options = [
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help=f"Change a field, for example {set_example}.",
        ),
        click.option(
            "--priority", type=int, default=0, metavar="N", help="Higher starts first (default: 0)."
        ),
        *([code] if code_default else []),
        click.option(
            "--env",
            "env_pairs",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Set a variable for the worker. NAME alone takes its value from here. A name like HF_TOKEN is a secret.",
        ),
        click.option(
            "--env-file",
            "env_files",
            multiple=True,
            type=click.Path(path_type=Path, readable=False),
            metavar="FILE",
            help="Set the variables of a file with NAME=VALUE lines.",
        ),
        click.option(
            "--secret-env",
            "secret_pairs",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="As --env, but the value is never recorded.",
        ),
        click.option(
            "--log-dir",
            metavar="D",
            type=click.Path(),  # text: an empty one must not become the current folder
            help="Also write the run's log lines below this folder: D/YYYY/MM/DD/RUN.log.jsonl.",
        ),
        click.option(
            "--event-log",
            metavar="F",
            type=click.Path(),
            help="Also append every event of the run to this file. Runs may share it.",
        ),
        *([another] if again else []),
        click.option(
            "--detach", "-d", "is_detached", is_flag=True, help="Print the run's id, do not follow it."
        ),
        json_option,
    ]

    def add(command: C) -> C:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def read_submit_options(options: dict[str, Any]) -> "SubmitOptions":
    """Those that the client takes. InvalidRequestError with every fault of variables and paths."""
    from gen_worker.errors import Fault
    from trn.client.caller_environment import GivenVariables, read_given
    from trn.core.errors import InvalidRequestError

    faults = [
        Fault(f"empty path, expected a {what}", path=option, kind="option")
        for option, name, what in TARGETS
        if options[name] == ""
    ]
    variables = GivenVariables({}, {})
    try:
        if options["env_pairs"] or options["env_files"] or options["secret_pairs"]:
            variables = read_given(
                pairs=options["env_pairs"], secret_pairs=options["secret_pairs"], files=options["env_files"]
            )
    except InvalidRequestError as refusal:
        faults += refusal.faults
    if faults:
        raise InvalidRequestError("the options are not valid", faults)
    return {
        "priority": options["priority"],
        "force_new": options.get("force_new", False),
        "is_import_tried": True,
        "log_dir": _absolute(options["log_dir"]),
        "event_log": _absolute(options["event_log"]),
        "env": variables.env,
        "secret_env": variables.secret_env,
    }


def _absolute(path: str | None) -> str:
    return "" if path is None else os.path.abspath(Path(path).expanduser())  # noqa: PTH100


def say_kept(output: "Output", asked: "SubmitOptions", submission: "SubmitResult") -> None:
    """An equal run that exists keeps its log paths: say so, if others were given."""
    run = submission.run
    for option, wanted, kept in (
        ("--log-dir", asked["log_dir"], run.log_dir),
        ("--event-log", asked["event_log"], run.event_log),
    ):
        if submission.existed and wanted and wanted != kept:
            output.say(f"{run.run_id} keeps what it was submitted with: {option} {kept or 'was not given'}")


def say_differences(output: "Output", differences: "Sequence[EnvDifference]") -> None:
    """In one line: variables that matter to a training and differ between here and the worker."""
    if not differences:
        return
    device = [item for item in differences if item.name in DEVICE_VARIABLES]
    differences = [item for item in differences if item.name not in DEVICE_VARIABLES]
    here = [item for item in differences if item.is_in_caller]
    there = [item for item in differences if not item.is_in_caller]
    parts = []
    if here:
        how = " ".join(f"--env {item.name}" for item in here)
        parts.append(f"not passed to the worker: {', '.join(map(_show, here))}; pass with {how}")
    if there:
        shown = ", ".join(
            f"{item.name}={_shorten(item.worker_value)}" if item.worker_value else item.name for item in there
        )
        parts.append(f"set in the worker and not here: {shown}")
    if device:
        shown = ", ".join(map(_show, device))
        parts.append(f"no effect on the worker: {shown}; choose devices with --devices or --cpu-only")
    output.say(f"trn: {'; '.join(parts)}")


def describe_differences(differences: "Sequence[EnvDifference]") -> list[dict[str, str | None]]:
    """For JSON. None: not set, or secret."""
    from trn.client.caller_environment import show_value

    return [
        {
            "name": item.name,
            "value": show_value(item.name) if item.is_in_caller else None,
            "worker_value": item.worker_value or None if item.is_in_worker else None,
        }
        for item in differences
    ]


def _show(item: "EnvDifference") -> str:
    from trn.client.caller_environment import show_value

    value = show_value(item.name)
    shown = item.name if value is None else f"{item.name}={_shorten(value)}"
    if not item.is_in_worker:
        return shown
    return f"{shown} (the worker has {_shorten(item.worker_value) if item.worker_value else 'another'})"


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_SHOWN else f"{value[: MAX_SHOWN - 1]}…"
