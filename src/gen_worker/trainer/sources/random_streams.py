"""Random streams of the data, a function of (seed, epoch, batch).

While data is fetched, the global generators of python, numpy and torch (CPU) hold the data's streams; otherwise those of
training. So augmentation does not depend on what training draws, and skipping a batch changes nothing. Generators
that a loader or dataset owns are swapped in the same way.
"""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from gen_worker.errors import InputError
from gen_worker.trainer.compute.repro import seed_numpy

MAX_DEPTH = 4  # of nested objects that are searched for generators
MAX_ITEMS = 64  # larger containers, such as a list of paths, are not searched

States = Mapping[str, Any]


def stream_seed(*path: int | str) -> int:
    """A seed that depends only on `path`."""
    digest = hashlib.blake2b(
        "/".join(map(str, path)).encode(), digest_size=8, person=b"gen_worker.data"
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_streams(seed: int) -> None:
    """Seed the global CPU generators of the loaded libraries."""
    random.seed(seed)
    if sys.modules.get("numpy") is not None:
        seed_numpy(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


class DataStreams:
    """The global streams and the owned generators of one source. Used from one thread."""

    def __init__(self, seed: int, owned: Mapping[str, object] | None = None) -> None:
        self._seed = seed
        self._owned = dict(owned or {})
        self._numpy_bits: Any = None  # the source of numpy's global generator inside `swapped_in`
        self.inside: States = self._capture_owned()  # after the last batch
        self.initial: States = self.inside

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._owned)

    def seed(self, *path: int | str) -> None:
        """Only inside `swapped_in`."""
        seed_streams(stream_seed(self._seed, *path))

    def set_inside(self, states: States) -> None:
        """States of the owned generators from the next `swapped_in` on; those without a state keep theirs."""
        self.inside = {**self.inside, **{name: states[name] for name in self._owned if name in states}}

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the data's streams inside, and restore the others afterwards."""
        python, numpy, torch = random.getstate(), sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None:
            # Swapped, not copied: two copies take 46 µs per batch. Both sides lose the cached second number of a pair
            # of normal draws, at every batch, resumed or not.
            numpy_bits = numpy.random.get_bit_generator()
            if self._numpy_bits is None:
                self._numpy_bits = numpy.random.MT19937()
            numpy.random.set_bit_generator(self._numpy_bits)
        torch_state = None if torch is None else torch.default_generator.get_state()
        outside = self._capture_owned()
        self._set_owned(self.inside)
        try:
            yield
        finally:
            self.inside = self._capture_owned()
            self._set_owned(outside)
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_bit_generator(numpy_bits)
            if torch is not None:
                torch.default_generator.set_state(torch_state)

    def _capture_owned(self) -> States:
        return {name: capture_generator(generator) for name, generator in self._owned.items()}

    def _set_owned(self, states: States) -> None:
        for name, generator in self._owned.items():
            set_generator(generator, states[name])


def find_generators(**roots: object) -> dict[str, object]:
    """Random generators in the attributes of these objects, by their place (`sampler.generator`), each once."""
    found: dict[str, object] = {}
    seen: set[int] = {id(getattr(random, "_inst", None))}

    def look(item: object, place: str, depth: int) -> None:
        if id(item) in seen:
            return
        seen.add(id(item))
        if is_generator(item):
            found[place] = item
        elif depth and isinstance(item, dict | list | tuple):
            if len(item) <= MAX_ITEMS:
                pairs = item.items() if isinstance(item, dict) else enumerate(item)
                for key, value in pairs:
                    look(value, f"{place}.{key}", depth - 1)
        elif depth and not isinstance(item, type | ModuleType) and not hasattr(type(item), "shape"):
            for name, value in (getattr(item, "__dict__", None) or {}).items():
                look(value, f"{place}.{name}" if place else name, depth - 1)

    for name, root in roots.items():
        look(root, name, MAX_DEPTH)
    return found


def is_generator(item: object) -> bool:
    if isinstance(item, random.Random):
        return True
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(item, numpy.random.Generator | numpy.random.RandomState):
        return item is not getattr(numpy.random.mtrand, "_rand", None)
    return torch is not None and isinstance(item, torch.Generator) and item is not torch.default_generator


def capture_generator(generator: Any) -> Any:
    """Its state in plain values that a checkpoint can hold."""
    if isinstance(generator, random.SystemRandom):
        raise InputError(
            "the data uses random.SystemRandom, whose numbers cannot be repeated: use random.Random(seed)"
        )
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    state = generator.get_state()
    if isinstance(state, tuple):  # numpy's RandomState
        return generator.get_state(legacy=False)
    return state.numpy().tobytes()


def set_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif isinstance(state, bytes):
        import torch

        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        generator.set_state(state)
