"""In-memory copies of an author's state, and the names of its NaN and infinite values. Never imports torch."""

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def copy_state(value: Any, into: Any = None) -> Any:
    """A copy that shares no memory with `value`. Reuses the tensors and arrays of `into`, an earlier copy.

    Tensors stay on their device. Mappings become dicts.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        source = value.detach()
        fits = isinstance(into, torch.Tensor) and _kind_of_tensor(into) == _kind_of_tensor(source)
        return into.copy_(source) if fits else source.clone()
    if numpy is not None and isinstance(value, numpy.ndarray):
        fits = isinstance(into, numpy.ndarray) and (into.shape, into.dtype) == (value.shape, value.dtype)
        if not fits or value.dtype.hasobject:
            return copy.deepcopy(value)
        numpy.copyto(into, value)
        return into
    if isinstance(value, Mapping):
        old = into if isinstance(into, Mapping) else {}
        return {key: copy_state(item, old.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        earlier = into if type(into) is type(value) and len(into) == len(value) else (None,) * len(value)
        return type(value)(copy_state(item, old) for item, old in zip(value, earlier, strict=True))
    return copy.deepcopy(value)


def _kind_of_tensor(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def nonfinite_names(state: Any) -> list[str]:
    """The tensors and arrays that hold NaN or infinity, as `model.weight`. Waits once for each device.

    Of a sharded tensor only the part of this process is checked.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    bad: list[str] = []
    flags: dict[Any, list[tuple[str, Any]]] = {}
    for name, value in _leaves(state, ""):
        if torch is not None and isinstance(value, torch.Tensor):
            local = value.detach()
            local = local.to_local() if hasattr(local, "to_local") else local  # of a sharded one
            if local.layout == torch.strided and (local.is_floating_point() or local.is_complex()):
                wide = local.float() if local.element_size() == 1 else local
                flags.setdefault(local.device, []).append((name, wide.isfinite().all()))
        elif (
            numpy is not None
            and isinstance(value, numpy.ndarray)
            and value.dtype.kind in "fc"
            and not numpy.isfinite(value).all()
        ):
            bad.append(name)
    for entries in flags.values():
        assert torch is not None
        are_finite = torch.stack([flag for _, flag in entries]).tolist()
        bad += [name for (name, _), is_finite in zip(entries, are_finite, strict=True) if not is_finite]
    return bad


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}" if name else str(index))
    else:
        yield name, value


def nonfinite_part(value: Any) -> str | None:
    """What is not finite in a metric's value, in words; None if all of it is finite. Waits for its device."""
    if type(value) is float:
        return None if math.isfinite(value) else repr(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            num_bad = value.numel() - int(value.detach().isfinite().sum())
            return f"non-finite in {num_bad} of {value.numel()} places" if num_bad else None
        value = value.item()
    elif numpy is not None and isinstance(value, numpy.ndarray) and value.size != 1:
        num_bad = value.size - int(numpy.isfinite(value).sum())
        return f"non-finite in {num_bad} of {value.size} places" if num_bad else None
    number = float(value)
    return None if math.isfinite(number) else repr(number)
