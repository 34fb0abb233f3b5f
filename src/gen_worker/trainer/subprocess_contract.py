"""All that crosses the line between a launcher and a worker: one file, versioned, written atomically, read strictly."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from gen_worker.errors import StartupError

CONTRACT_VERSION = "v1"


class ContractError(StartupError):
    """The contract file is missing, damaged or of a version this reader does not know."""


class TrainerSubprocessContractV1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is handed. Any incompatible change of shape needs a new `contract_version`."""

    contract_version: Literal["v1"] = "v1"
    trainer_plugin: str
    job_spec_path: str
    arrow_ipc_path: str | None = None
    checkpoints_dir: str
    samples_dir: str
    events_path: str
    extra_env: dict[str, str] = {}


class _Version(msgspec.Struct):
    contract_version: object = None


def write_subprocess_contract(contract: TrainerSubprocessContractV1, path: Path | str) -> Path:
    """Write the file whole or not at all; durable when this returns."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(contract), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_subprocess_contract(path: Path | str) -> TrainerSubprocessContractV1:
    """Read a contract; unknown versions and unknown fields are refused."""
    try:
        text = Path(path).read_bytes()
    except OSError as fault:
        raise ContractError(f"the contract file {path} cannot be read: {fault.strerror}") from fault
    try:
        version = msgspec.json.decode(text, type=_Version).contract_version
        if version != CONTRACT_VERSION:
            raise ContractError(
                f"{path}: contract_version is {version!r}; this worker reads {CONTRACT_VERSION!r} only:"
                " start it with the launcher of its own release"
            )
        return msgspec.json.decode(text, type=TrainerSubprocessContractV1)
    except msgspec.MsgspecError as fault:
        raise ContractError(f"{path} is not a subprocess contract: {fault}") from fault
