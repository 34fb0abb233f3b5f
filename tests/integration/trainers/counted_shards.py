"""Sharded models that count, in each process, the whole tensors that live while a save gathers them."""

import os
import signal
import weakref
from pathlib import Path
from typing import Any

import parallel_mlp
import torch
from torch.distributed.tensor import DTensor

from gen_worker.pytorch_runner import PyTorchTrainer

_gather = DTensor.full_tensor
_given: list[weakref.ref[torch.Tensor]] = []
_counts = [0]  # after each gather


def _counted(value: DTensor, **options: Any) -> torch.Tensor:
    rank = torch.distributed.get_rank()
    full = _gather(value, **options)
    _given.append(weakref.ref(full))
    if rank == int(os.environ.get("KILL_RANK", "1")) and len(_given) == int(
        os.environ.get("KILL_AT_GATHER", "0")
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    _counts.append(sum(ref() is not None for ref in _given))
    Path(os.environ["COUNTS"], f"rank-{rank}").write_text(f"{len(_given)} {max(_counts)}")
    return full


DTensor.full_tensor = _counted  # type: ignore[method-assign]


class CountedFsdp(parallel_mlp.PlainFsdp): ...


class CountedRunner(PyTorchTrainer): ...
