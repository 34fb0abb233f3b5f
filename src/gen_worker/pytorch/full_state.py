"""State by parameter names, for any number of processes: a 4-process checkpoint loads on 1 or 2.

The loop gathers sharded tensors on saving, one at a time; loading shards them again. Optimizer state is renamed: torch
numbers its parameters, and the numbers change with the groups.
"""

from collections.abc import Mapping
from typing import Any

import torch

from gen_worker.errors import CheckpointError

_MAX_LISTED = 8


def cut_like(value: Any, like: Any) -> Any:
    """A copy of `value`, sharded as `like` is."""
    if not isinstance(value, torch.Tensor):
        return value
    if not hasattr(like, "full_tensor") or value.shape != like.shape:
        return value.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    ).clone()


def load_module_state(module: torch.nn.Module, payload: Mapping[str, Any], *, what: str) -> None:
    """CheckpointError if names or shapes differ; the module is then unchanged."""
    live = module.state_dict()
    missing = [name for name in live if name not in payload]
    unexpected = [name for name in payload if name not in live]
    reshaped = [name for name in live if name in payload and payload[name].shape != live[name].shape]
    faults = [
        f"{word} {', '.join(names[:_MAX_LISTED])}{', …' if len(names) > _MAX_LISTED else ''}"
        for word, names in (("missing:", missing), ("unexpected:", unexpected), ("other shapes:", reshaped))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"the checkpoint's {what} is of another model ({'; '.join(faults)}). Resume with the same model, or start a"
            " new run from its weights (`weights`)"
        )
    module.load_state_dict({name: cut_like(value, live[name]) for name, value in payload.items()})


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with names for numbers."""
    names = _names(module, optimizer)
    raw = optimizer.state_dict()
    return {
        "state": {names[number]: dict(entry) for number, entry in raw["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in raw["param_groups"]
        ],
    }


def load_optimizer_state(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, payload: Mapping[str, Any]
) -> None:
    names = _names(module, optimizer)
    numbers = {name: number for number, name in enumerate(names)}
    saved = [list(group["params"]) for group in payload["param_groups"]]
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    now, start = [], 0
    for group in optimizer.param_groups:
        now.append(names[start : start + len(group["params"])])
        start += len(group["params"])
    if [sorted(group) for group in saved] != [sorted(group) for group in now]:
        differing = sorted(set().union(*saved) ^ set().union(*now)) or ["the groups"]
        raise CheckpointError(
            "the checkpoint's optimizer has other parameters or groups than this run:"
            f" {', '.join(differing[:_MAX_LISTED])}. Restore `freeze` and `optimizer`, or start a new run"
        )
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {
                    key: cut_like(value, parameters[numbers[name]]) for key, value in entry.items()
                }
                for name, entry in payload["state"].items()
            },
            # In this run's order of parameters.
            "param_groups": [
                {**group, "params": [numbers[name] for name in names_now]}
                for group, names_now in zip(payload["param_groups"], now, strict=True)
            ],
        }
    )


def _names(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The name of each parameter by the number that the optimizer gives it."""
    by_id = {id(value): name for name, value in module.named_parameters()}
    return [by_id[id(value)] for group in optimizer.param_groups for value in group["params"]]
