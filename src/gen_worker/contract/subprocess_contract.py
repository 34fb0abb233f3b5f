"""The contract file: everything that a worker is given. Versioned, written atomically, read strictly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

import msgspec

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.regular import read_regular
from gen_worker.errors import StartupError

CONTRACT_VERSION = "v1"
ARTIFACTS_DIR = "/tmp/training"  # noqa: S108  (the contract's default)
_NEEDED = ("trainer_plugin", "job_spec_path", "checkpoints_dir", "samples_dir", "events_path")


def find_cache_dir(environ: Mapping[str, str]) -> Path:
    """The cache folder of workers with these variables: inputs, decoded data."""
    if environ.get("TRN_CACHE_DIR"):
        return Path(environ["TRN_CACHE_DIR"]).expanduser()
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "trn"


class ContractError(StartupError, ValueError):
    """The contract is incomplete, damaged, or of an unknown version."""


class TrainerSubprocessContractV1(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any incompatible change needs a new `contract_version`."""

    contract_version: Literal["v1"] = "v1"
    trainer_plugin: str
    job_spec_path: str
    arrow_ipc_path: str | None = None
    checkpoints_dir: str = f"{ARTIFACTS_DIR}/checkpoints"
    samples_dir: str = f"{ARTIFACTS_DIR}/samples"
    events_path: str = f"{ARTIFACTS_DIR}/metrics/events.jsonl"
    extra_env: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.contract_version != CONTRACT_VERSION:
            raise ContractError(
                f"contract_version is {self.contract_version!r}, expected {CONTRACT_VERSION!r}"
            )
        for name in _NEEDED:
            if not (getattr(self, name) or "").strip():
                raise ContractError(f"{name} is {getattr(self, name)!r}, expected text that is not empty")


class _Version(msgspec.Struct):
    contract_version: object = None


@overload
def write_subprocess_contract(path: Path | str, contract: TrainerSubprocessContractV1) -> Path: ...
@overload
def write_subprocess_contract(path: TrainerSubprocessContractV1, contract: Path | str) -> Path: ...
def write_subprocess_contract(path: Any, contract: Any) -> Path:
    """Write the file durably. The two arguments may be in either order."""
    if isinstance(path, TrainerSubprocessContractV1):
        path, contract = contract, path
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, msgspec.json.format(msgspec.json.encode(contract), indent=2) + b"\n")
    return target


def read_subprocess_contract(path: Path | str) -> TrainerSubprocessContractV1:
    """Read a contract; unknown versions and unknown fields are refused."""
    try:
        text = read_regular(path, follow=True)
    except OSError as fault:
        raise ContractError(f"the contract file {path} cannot be read: {fault.strerror}") from fault
    try:
        version = msgspec.json.decode(text, type=_Version).contract_version
        if version != CONTRACT_VERSION:
            raise ContractError(
                f"{path}: contract_version is {version!r}, but this worker reads only {CONTRACT_VERSION!r}:"
                " start it from the same release"
            )
        return msgspec.json.decode(text, type=TrainerSubprocessContractV1)
    except msgspec.MsgspecError as fault:
        raise ContractError(f"{path} is not a subprocess contract: {fault}") from fault
