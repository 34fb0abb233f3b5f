"""A job of `trn serve` or `trn predict`, made of the options of the command."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

# What sets a field of the job besides `--set`.
_OPTIONS = {
    "mode": "this command",
    "name": "--name",
    "serving.checkpoint": "RUN",
    "serving.address": "--address",
    "serving.replicas": "--replicas",
    "serving.follow": "--follow",
    "prediction.checkpoint": "RUN",
    "prediction.parquet_paths": "--data",
    "prediction.out": "--out",
    "prediction.columns": "--copy",
    "prediction.batch_rows": "--batch-rows",
    "resources.devices": "an option for devices",
    "resources.gpus": "an option for devices",
}


def absolute_model(text: str) -> str:
    """RUN@… as it is; the path of a checkpoint absolute, since the daemon reads it."""
    if "/" not in text and not text.endswith(".json"):
        return text
    from gen_worker.contract.checkpoints.choice import META_SUFFIX

    is_path = "/" in text or text.endswith(META_SUFFIX)
    return os.path.abspath(Path(text).expanduser()) if is_path else text  # noqa: PTH100


def make_model_job(config: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """With the changes of `--set`. InvalidRequestError with every fault of theirs; the daemon finds those of other options."""
    if not assignments:  # to check the fields would take longer to import than all else here
        return config
    from trn.client.job_file import assign, find_doubled, find_field_faults
    from trn.core.errors import InvalidRequestError

    faults = list(
        find_doubled(assignments, {field: _OPTIONS[field] for field in _OPTIONS if _is_in(config, field)})
    )
    faults += (fault for text in assignments if (fault := assign(config, text)))
    faults += find_field_faults(config)
    if faults:
        raise InvalidRequestError("the job is not valid", list(dict.fromkeys(faults)))
    return config


def _is_in(config: dict[str, Any], field: str) -> bool:
    section, _, name = field.rpartition(".")
    return name in (config.get(section, {}) if section else config)


def choose_devices(
    config: dict[str, Any], *, devices: str | None, count: int | None, is_cpu_only: bool
) -> None:
    """Set the resources of the job by these options, in place."""
    from trn.client.job_file import Changes, apply_devices
    from trn.core.errors import InvalidRequestError

    changes = Changes(devices=devices, device_count=count, is_cpu_only=is_cpu_only)
    if faults := list(apply_devices(config, changes)):
        raise InvalidRequestError("the options are not valid", faults)


def device_options(command: Any) -> Any:
    """Adds them to a command."""
    for option in (
        click.option("--cpu-only", "is_cpu_only", is_flag=True, help="Use no GPU."),
        click.option("--device-count", type=click.IntRange(min=1), metavar="N", help="Use any N GPUs."),
        click.option("--devices", metavar="D,…", help="Use these devices, for example cuda:0,cuda:1."),
    ):
        command = option(command)
    return command
