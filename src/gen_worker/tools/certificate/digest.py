"""Short digests of the values in a batch, a state or an object, by path; equal across processes."""

import hashlib
import random
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_DEPTH = 6
MAX_LEAVES = 20_000
MAX_WORDS = 60
# Modules whose objects say nothing about training.
OPAQUE = (
    "logging",
    "threading",
    "_thread",
    "io",
    "_io",
    "concurrent",
    "asyncio",
    "typing",
    "functools",
    "weakref",
    "re",
    "abc",
    "contextlib",
    "multiprocessing",
    "queue",
    "socket",
    "subprocess",
    "tempfile",
    "importlib",
)
OPAQUE_OURS = "gen_worker.trainer"


class Leaf(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One value: its digest, its kind (`value`, `array`, `rng`), and a short text."""

    digest: str
    kind: str
    words: str


def describe_tree(value: Any, root: str) -> dict[str, Leaf]:
    """The leaves of `value` by path."""
    walk = _Walk(is_whole=True)
    walk.visit(value, root)
    return walk.leaves


def describe_hidden(trainer: object, state: object) -> dict[str, Leaf]:
    """The leaves of the trainer, of the state that `configure` returned, and of the globals of the class's module."""
    walk = _Walk(is_whole=False)
    walk.visit(trainer, "self")
    walk.visit(state, "state")
    name_of_module = type(trainer).__module__
    module = sys.modules.get(name_of_module)
    for name, value in [] if module is None else list(vars(module).items()):
        if not name.startswith("__"):
            walk.visit(value, f"{name_of_module}.{name}", 1)
    return walk.leaves


def digest_batch(batch: Any) -> str:
    if type(batch).__module__.startswith("pyarrow"):
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write(batch)
        return _short(sink.getvalue())
    leaves = describe_tree(batch, "batch")
    return _short(repr([(path, leaf.digest) for path, leaf in leaves.items()]).encode())


class _Walk:
    """Visits containers and objects. `is_whole`: without a limit of depth and number."""

    def __init__(self, *, is_whole: bool) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._is_whole = is_whole
        self._seen: dict[int, Any] = {}  # the objects too: ids are reused

    def visit(self, value: Any, path: str, depth: int = 0) -> None:
        if not self._is_whole and (depth > MAX_DEPTH or len(self.leaves) >= MAX_LEAVES):
            return
        leaf = _leaf(value)
        if leaf is not None:
            self.leaves[path] = leaf
            return
        if id(value) in self._seen or _is_opaque(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            for place, (key, item) in enumerate(list(value.items())):
                self.visit(item, f"{path}[{_key(key, place)}]", depth + 1)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                self.visit(item, f"{path}[{place}]", depth + 1)
        else:
            self._visit_object(value, path, depth)
        if self._is_whole:  # what is held twice is saved twice
            del self._seen[id(value)]

    def _visit_object(self, value: Any, path: str, depth: int) -> None:
        """Its `state_dict` and public attributes where it has one (modules, optimizers); else all attributes."""
        attributes = _attributes(value)
        if path != "self" and callable(
            getattr(value, "state_dict", None)
        ):  # the trainer's own takes the state
            try:
                content = value.state_dict()
            except Exception:  # not one that can be called like this
                content = {}
            self.visit(content, f"{path}.state_dict()", depth + 1)
            attributes = {name: item for name, item in attributes.items() if not name.startswith("_")}
        for name, item in attributes.items():
            self.visit(item, f"{path}.{name}", depth + 1)
        words = "" if attributes else _repr(value)
        if words and not re.search(r" at 0x[0-9a-f]+|^<", words):
            self.leaves[path] = Leaf(digest=_short(words.encode()), kind="value", words=words[:MAX_WORDS])


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return found


def _leaf(value: Any) -> Leaf | None:
    if value is None or isinstance(value, bool | int | float | complex | str):
        words = value.hex() if isinstance(value, float) else repr(value)
        return Leaf(
            digest=_short(f"{type(value).__name__} {words}".encode()),
            kind="value",
            words=repr(value)[:MAX_WORDS],
        )
    if isinstance(value, bytes | bytearray):
        return Leaf(digest=_short(bytes(value)), kind="value", words=f"{len(value)} bytes")
    if isinstance(value, set | frozenset):  # its order is not its content
        words = repr(sorted(map(repr, value)))
        return Leaf(digest=_short(words.encode()), kind="value", words=words[:MAX_WORDS])
    if isinstance(value, random.Random):
        return Leaf(digest=_short(repr(value.getstate()).encode()), kind="rng", words="random.Random")
    module = type(value).__module__.partition(".")[0]
    if module == "numpy":
        return _numpy_leaf(value)
    return _torch_leaf(value) if "torch" in sys.modules else None


def _numpy_leaf(value: Any) -> Leaf | None:
    import numpy as np

    if isinstance(value, np.random.Generator):
        state = repr(value.bit_generator.state)
        return Leaf(digest=_short(state.encode()), kind="rng", words="numpy.random.Generator")
    if isinstance(value, np.random.RandomState):
        state = repr([np.asarray(part).tobytes() for part in value.get_state()])
        return Leaf(digest=_short(state.encode()), kind="rng", words="numpy.random.RandomState")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        head = f"{array.dtype} {array.shape} ".encode()
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return Leaf(digest=_short(head + content), kind="array", words=_array_words(array))
    return None


def _torch_leaf(value: Any) -> Leaf | None:
    import torch

    if isinstance(value, torch.Generator):
        content = value.get_state().numpy().tobytes()
        return Leaf(digest=_short(content), kind="rng", words="torch.Generator")
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        plain = value.detach().cpu().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        head = f"{plain.dtype} {tuple(plain.shape)} ".encode()
        words = repr(plain.item()) if plain.numel() == 1 else f"{plain.dtype} {tuple(plain.shape)}"
        return Leaf(digest=_short(head + content), kind="array", words=words[:MAX_WORDS])
    return None


def _array_words(array: Any) -> str:
    return (repr(array.item()) if array.size == 1 else f"{array.dtype} {array.shape}")[:MAX_WORDS]


def _key(key: object, place: int) -> str:
    """A tensor may be a key: its text would differ between processes."""
    is_plain = isinstance(key, str | int | float | bool | None)
    return repr(key) if is_plain else f"<{type(key).__name__} {place}>"


def _is_opaque(value: object) -> bool:
    """Code, and objects that no checkpoint would have to keep."""
    code = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    module = type(value).__module__
    return isinstance(value, code) or module.partition(".")[0] in OPAQUE or module.startswith(OPAQUE_OURS)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return ""


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()
