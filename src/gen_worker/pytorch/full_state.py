"""States by parameter names, whatever the number of processes: what 4 processes save, 1 or 2 can load.

A sharded tensor goes out as it is: the loop puts it together, one tensor at a time. It is cut on the way in. Everything
else is a renaming: torch numbers the parameters of an optimizer, and numbers change with the groups.
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


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    return dict(module.state_dict())


def load_module_state(module: torch.nn.Module, payload: Mapping[str, Any], *, what: str) -> None:
    """CheckpointError, and nothing changed, where names or shapes differ."""
    live = module.state_dict()
    missing = [name for name in live if name not in payload]
    unexpected = [name for name in payload if name not in live]
    reshaped = [name for name in live if name in payload and payload[name].shape != live[name].shape]
    faults = [
        f"{word} {', '.join(names[:_MAX_LISTED])}{', …' if len(names) > _MAX_LISTED else ''}"
        for word, names in (("it lacks", missing), ("it has also", unexpected), ("other shapes:", reshaped))
        if names
    ]
    if faults:
        raise CheckpointError(
            f"the checkpoint's {what} is of another model: {'; '.join(faults)}. Resume with the model that was saved, or"
            " start a new run from its weights (`weights`)"
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
            f" {', '.join(differing[:_MAX_LISTED])}. Put `freeze` and `optimizer` back, or start a new run"
        )
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {
                    key: cut_like(value, parameters[numbers[name]]) for key, value in entry.items()
                }
                for name, entry in payload["state"].items()
            },
            # In this run's order of parameters: it is the names that say which is which.
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
