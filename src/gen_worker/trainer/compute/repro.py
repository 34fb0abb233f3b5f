"""Seeds, and scalars from the values of a training step."""

import sys
from typing import Any


def seed_everything(seed: int, *, torch: bool | None = None) -> int:
    """Seed the global generators of python, numpy and torch (all devices); return the seed.

    Torch is imported if it is installed. `torch=False` skips it (the import costs seconds); `torch=True` fails where
    it is missing. Your own generators are not seeded. The runtime calls this before `setup`.
    """
    import operator
    import random

    number = operator.index(seed)
    if isinstance(seed, bool) or not 0 <= number < 2**64:
        raise ValueError(f"the seed is {seed!r}, expected a whole number from 0 to 2**64 - 1")
    random.seed(number)
    seed_numpy(number)
    if torch is None:
        torch = _is_installed("torch")
    if torch:
        # On a CPU torch reads only the low 32 bits: fold the rest in.
        _seed_torch(number ^ (number >> 32))
    return number


def seed_numpy(seed: int) -> None:
    if not _is_installed("numpy"):
        return
    import numpy as np

    # The legacy generator takes words of 32 bits.
    np.random.seed(seed if seed < 2**32 else [seed & 0xFFFFFFFF, seed >> 32])


def _seed_torch(seed: int) -> None:
    """All devices. `torch.manual_seed` takes 5 ms to remember who asked, for each kind of device that is not in use;
    a torch that was built for the CPU alone has none to remember it for.
    """
    import torch

    if torch.accelerator.current_accelerator(check_available=False) is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    from importlib.util import find_spec

    return find_spec(name) is not None


def to_float_scalar(value: Any) -> float:
    """The number in `value`: a Python number, or a value of one element with `.item()`.

    Waits for the device of a tensor. TypeError: not a number. ValueError: not exactly one.
    """
    if type(value) is float:
        return value
    if shape := getattr(value, "shape", None):
        dims = tuple(shape)
        if any(dim != 1 for dim in dims):
            raise ValueError(
                f"a {type(value).__name__} of shape {dims} is not one number: reduce it first, with .mean() for example"
            )
    found = value
    if callable(getattr(value, "item", None)):
        try:
            found = value.item()
        except (RuntimeError, ValueError) as error:  # a meta tensor, say
            raise ValueError(f"a {type(value).__name__} did not give one number: {error}") from error
        if type(found) is float:
            return found
    if isinstance(found, (str, bytes, bytearray, complex)) or not hasattr(found, "__float__"):
        raise TypeError(f"expected one number, found {found!r:.80} ({type(value).__name__})")
    return float(found)
