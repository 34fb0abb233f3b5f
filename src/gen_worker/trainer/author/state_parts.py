"""Finds optimizers, schedulers and modules in a state by their attributes. torch is not imported."""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from gen_worker.contract.job.spec import TrainingJobSpec
from gen_worker.trainer.author.hyperparams import Hyperparams
from gen_worker.trainer.contracts import StepContext

_MAX_DEPTH = 4
_MAX_VISITED = 5_000
_MAX_ITEMS = 200


def find_parts(is_wanted: Callable[[Any], bool], roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, part) of each wanted part, once. Runs no code of the author's but attribute reads."""
    seen: set[int] = set()
    waiting = [(name, value, 0) for name, value in roots.items()]
    while waiting and len(seen) < _MAX_VISITED:
        path, value, depth = waiting.pop(0)
        if value is None or isinstance(value, str | bytes | int | float) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_wanted(value):
            yield path, value
        elif depth < _MAX_DEPTH:
            waiting += [(f"{path}{step}", item, depth + 1) for step, item in _children(value)]


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Hyperparams | TrainingJobSpec | StepContext):
        return  # they record what is read
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in islice(value.items(), _MAX_ITEMS))
    elif type(value) in (list, tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value[:_MAX_ITEMS]))
    elif not isinstance(
        value, type | types.ModuleType | types.FunctionType | types.MethodType
    ) and not _is_foreign(value):
        slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
        for name in dict.fromkeys([*getattr(value, "__dict__", {}), *slots, *getattr(value, "_fields", ())]):
            with contextlib.suppress(Exception):
                yield f".{name}", getattr(value, name)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_foreign(value: Any) -> bool:
    """Of a library whose objects hold no optimizer: a torch module has thousands of parts."""
    return hasattr(type(value), "named_modules") or type(value).__module__.partition(".")[0] in (
        "builtins", "numpy", "pyarrow", "torch", "collections", "logging", "threading", "pathlib",
    )  # fmt: skip


def is_optimizer_or_scheduler(value: Any) -> bool:
    return is_optimizer(value) or is_scheduler(value)


def is_optimizer(value: Any) -> bool:
    groups = _attribute(value, "param_groups")
    return isinstance(groups, list) and bool(groups) and all(isinstance(group, dict) for group in groups)


def is_scheduler(value: Any) -> bool:
    return (
        is_optimizer(_attribute(value, "optimizer"))
        and callable(_attribute(value, "step"))
        and callable(_attribute(value, "load_state_dict"))
        and (hasattr(value, "last_epoch") or hasattr(value, "_schedulers"))
    )


def is_scheduler_of(scheduler: Any, optimizer: Any) -> bool:
    """Also of a wrapper: they share the parameter groups."""
    groups = _attribute(scheduler.optimizer, "param_groups")
    return groups is not None and groups is _attribute(optimizer, "param_groups")


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, type):
        return None
    try:
        return getattr(value, name, None)
    except Exception:  # the author's property
        return None
