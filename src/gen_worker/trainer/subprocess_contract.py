"""The public import path of `gen_worker.contract.subprocess_contract`."""

from gen_worker.contract.subprocess_contract import (
    CONTRACT_VERSION,
    ContractError,
    TrainerSubprocessContractV1,
    read_subprocess_contract,
    write_subprocess_contract,
)

__all__ = [
    "CONTRACT_VERSION",
    "ContractError",
    "TrainerSubprocessContractV1",
    "read_subprocess_contract",
    "write_subprocess_contract",
]
