"""What the model parent knows of its children: templates, the orders that wait for them, and how a process ended."""

import os
import socket
from dataclasses import dataclass, field

import msgspec

from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.inference.model.orders import FromTemplate, LaunchWorker, LoadFailed, OrderReader, Prepare
from gen_worker.inference.model.process import name_signal


@dataclass(slots=True, kw_only=True)
class Ordered:
    """An order that no worker has yet, with our copy of its descriptor: so that it can be answered if the template dies."""

    order: LaunchWorker
    fd: int


@dataclass(slots=True, kw_only=True)
class Child:
    pid: int
    link: socket.socket
    orders: OrderReader[FromTemplate]
    key: bytes
    version: VersionFacts
    waiting: dict[int, Ordered] = field(default_factory=dict)
    has_loaded: bool = False
    is_ahead: bool = False  # was forked before its version was known
    is_copy: bool = False  # of the first worker, whose child it is as long as that lives
    is_open: bool = True  # takes orders
    failure: LoadFailed | None = None


def key_of(order: LaunchWorker | Prepare) -> bytes:
    """Orders with the same one get copies of one model."""
    return msgspec.msgpack.encode([order.version, order.options])


def code_of(version: ModelVersion) -> bytes:
    """Versions with the same one are loaded alike until their checkpoint is read."""
    environment = version.config.get("env")
    return msgspec.msgpack.encode(
        [
            version.interpreter,
            version.trainer,
            version.code_hash,
            version.code_dir,
            version.frozen_from,
            version.base_dir,
            environment,
        ]
    )


def describe_end(status: int) -> tuple[int | None, str, str]:
    """(exit code, name of the signal, words) of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = name_signal(-code)
        return None, name, f"was killed by {name}"
    return code, "", f"exited with code {code}"
