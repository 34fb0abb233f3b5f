"""Parts of a state that are infinite by design: a mask of -inf, a best value that starts at inf.

They are found after `configure`. Infinities elsewhere in a checkpoint, and any NaN, are faults. torch is not imported.
"""

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from gen_worker.trainer.author.state_parts import find_parts


def find_infinite_parts(state: Any, trainer: Any) -> frozenset[str]:
    """The last parts of their names: `mask`, `attention.mask`. Buffers, frozen parameters and tensors of the state."""
    flags: dict[Any, list[tuple[str, Any]]] = {}
    found = set()
    for name, value in _candidates(state, trainer):
        with contextlib.suppress(Exception):  # a sharded tensor, or one without values
            if hasattr(value, "is_floating_point"):
                if value.is_floating_point():
                    flags.setdefault(value.device, []).append((name, value.detach().isinf().any()))
            elif value.dtype.kind == "f" and bool(abs(value).max(initial=0) == float("inf")):
                found.add(name)
    for entries in flags.values():
        with contextlib.suppress(Exception):
            are_infinite = sys.modules["torch"].stack([flag for _, flag in entries]).tolist()
            found |= {name for (name, _), is_it in zip(entries, are_infinite, strict=True) if is_it}
    return frozenset(found)


def is_infinite_part(name: str, parts: Collection[str]) -> bool:
    """Whether a saved tensor is such a part, wherever it is in the payload."""
    return any(name == part or name.endswith(f".{part}") for part in parts)


def _candidates(state: Any, trainer: Any) -> Iterator[tuple[str, Any]]:
    for path, part in find_parts(_is_module_or_array, {"state": state, "trainer": trainer}):
        if hasattr(part, "named_buffers"):
            yield from part.named_buffers()
            yield from ((name, item) for name, item in part.named_parameters() if not item.requires_grad)
        else:
            yield _last_name(path), part


def _is_module_or_array(value: Any) -> bool:
    if isinstance(value, type):
        return False
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor | torch.nn.Module)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _last_name(path: str) -> str:
    """Of `state['parts'][0].best`: best."""
    return path.replace("[", ".").rpartition(".")[2].strip("]'\"")
