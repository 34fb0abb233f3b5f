"""`--env`, `--env-file` and `--secret-env`; and what is said of variables that a worker does not get."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trn.core.workers_variables import DEVICE_VARIABLES

if TYPE_CHECKING:
    from trn.cli.output import Output
    from trn.client.caller_environment import GivenVariables
    from trn.proto.records import EnvDifference

C = TypeVar("C", bound=Callable[..., Any])
MAX_SHOWN = 40  # characters of a value


def environment_options(command: C) -> C:
    """Adds the options to a command."""
    env = click.option(
        "--env",
        "env_pairs",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Set a variable for the worker; NAME alone takes its value from here. A name like HF_TOKEN is a secret.",
    )
    env_file = click.option(
        "--env-file",
        "env_files",
        multiple=True,
        type=click.Path(path_type=Path, readable=False),
        metavar="FILE",
        help="Set the variables of a file with NAME=VALUE lines.",
    )
    secret_env = click.option(
        "--secret-env",
        "secret_pairs",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="As --env, and the value is never recorded, whatever the name.",
    )
    return env(env_file(secret_env(command)))


def read_variables(options: dict[str, Any]) -> "GivenVariables":
    """What the options give. InvalidRequestError with every fault."""
    from trn.client.caller_environment import GivenVariables, read_given

    if not (options["env_pairs"] or options["env_files"] or options["secret_pairs"]):
        return GivenVariables({}, {})
    return read_given(
        pairs=options["env_pairs"],
        secret_pairs=options["secret_pairs"],
        files=options["env_files"],
    )


def say_differences(output: "Output", differences: "Sequence[EnvDifference]") -> None:
    """In one line: variables that matter to a training, and that the worker does not have as they are here."""
    if not differences:
        return
    device = [item for item in differences if item.name in DEVICE_VARIABLES]
    differences = [item for item in differences if item.name not in DEVICE_VARIABLES]
    here = [item for item in differences if item.is_in_caller]
    there = [item for item in differences if not item.is_in_caller]
    parts = []
    if here:
        shown = ", ".join(_show(item) for item in here)
        how = " ".join(f"--env {item.name}" for item in here)
        parts.append(f"not passed to the worker: {shown}; pass with {how}")
    if there:
        shown = ", ".join(
            f"{item.name}={_shorten(item.worker_value)}" if item.worker_value else item.name for item in there
        )
        parts.append(f"set in the worker and not here: {shown}")
    if device:
        shown = ", ".join(_show(item) for item in device)
        parts.append(f"no effect on the worker: {shown}; choose devices with --devices or --cpu-only")
    output.say(f"trn: {'; '.join(parts)}")


def describe_differences(differences: "Sequence[EnvDifference]") -> list[dict[str, str | None]]:
    """For JSON. None: not set, or not to be shown."""
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
