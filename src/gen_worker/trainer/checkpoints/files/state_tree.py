"""A state (nested dicts and lists of tensors, arrays and plain values) as a JSON tree with tensor references.

What JSON can say stays as it is. The rest is an object with one key that starts with "$":

    {"$tensor": 3}  {"$ndarray": 4}     row 3 / 4 of the checkpoint's tensor table
    {"$tuple": [...]}                   a tuple
    {"$dict": [[key, value], ...]}      a dict with a key that is not a string, or that starts with "$"
    {"$int": "…"}                       an int beyond 2**53
    {"$float": "7ff0000000000000"}      a float that is not finite: its 64 bits
    {"$bytes": "…"}  {"$str": "…"}      base64; `$str` is for text that is not valid Unicode
    {"$scalar": ["<f4", "…"]}           a numpy scalar: dtype, base64 of its bytes

`decode(encode(x))` equals `x`, bit for bit, also through JSON text. Anything else is refused with its path.
"""

import base64
import math
import re
import struct
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from gen_worker.errors import CheckpointError
from gen_worker.trainer.author.hyperparams import Hyperparams, TrackedHyperparams

MAX_DEPTH = 100
PLAIN_INT = 2**53  # beyond it, JSON readers in other languages lose digits
NUMPY_KINDS = "biufcmM"
# As `dtype.str` writes it. numpy itself takes far more for a dtype, some of it with a warning.
_SCALAR_DTYPE = re.compile(rf"[<>|=][{NUMPY_KINDS}]\d+(\[\w+\])?")

_ALLOWED = "dict, list, tuple, torch tensors, numpy arrays and scalars, int, float, bool, str, bytes and None"


class TensorSink(Protocol):
    """Collects the tensors of a state; returns their rows in the tensor table."""

    def add_torch(self, tensor: Any, name: str) -> int: ...

    def add_numpy(self, array: np.ndarray[Any, Any], name: str) -> int: ...


def encode(value: object, sink: TensorSink, *, root: str = "state", name_prefix: str = "") -> object:
    """`value` as JSON objects; tensors go to `sink`, named by path (`model.fc.weight`).

    CheckpointError, with the path, for what could not be restored exactly.
    """
    return _Encoder(sink, root, name_prefix).node(value)


def decode(node: object, tensors: Sequence[object], *, where: str = "state") -> object:
    """The value that `encode` was given, with references replaced by `tensors[row]`."""
    try:
        return _decode(node, tensors)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        struct.error,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{where} is not a state tree of this version: {error}") from error


def format_path(root: str, trail: Sequence[object]) -> str:
    """`state["optimizer"]["state"][0]`."""
    return root + "".join(f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in trail)


class _Encoder:
    def __init__(self, sink: TensorSink, root: str, name_prefix: str) -> None:
        self._sink = sink
        self._root = root
        self._name_prefix = name_prefix
        self._trail: list[object] = []
        self._open: set[int] = set()  # ids of the containers around the current value
        # Where torch is not imported, no value can be a tensor.
        torch = sys.modules.get("torch")
        self._tensor_type: type | None = getattr(torch, "Tensor", None)
        self._by_type: dict[type, Callable[[Any], object]] = {
            dict: self._mapping,
            OrderedDict: self._mapping,
            defaultdict: self._mapping,
            Hyperparams: self._mapping,
            TrackedHyperparams: self._mapping,
            list: lambda value: self._container(value, self._items),
            tuple: lambda value: self._container(value, lambda items: {"$tuple": self._items(items)}),
            int: _encode_int,
            float: _encode_float,
            str: _encode_str,
            bytes: lambda value: {"$bytes": _to_base64(value)},
            bool: lambda value: value,
            type(None): lambda value: value,
            np.ndarray: self._array,
        }

    def node(self, value: object) -> object:
        encoder = self._by_type.get(type(value))
        if encoder is not None:
            return encoder(value)
        if self._tensor_type is not None and isinstance(value, self._tensor_type):
            return {"$tensor": self._add(self._sink.add_torch, value)}
        if isinstance(value, np.generic):
            return self._scalar(value)
        raise self._refusal(value)

    def _mapping(self, value: Mapping[object, object]) -> object:
        return self._container(value, self._mapping_items)

    def _mapping_items(self, value: Mapping[object, object]) -> object:
        if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
            return {key: self._child(key, item) for key, item in value.items()}
        return {"$dict": [[self._key(key), self._child(key, item)] for key, item in value.items()]}

    def _key(self, key: object) -> object:
        if key is None or type(key) in (str, int, bool, float):
            return self.node(key)
        if type(key) is tuple:
            return {"$tuple": [self._key(part) for part in key]}
        raise CheckpointError(
            f"{format_path(self._root, self._trail)} has a key {key!r} of type {_type_name(key)}; "
            "a checkpoint can hold keys that are str, int, bool, float, None or tuples of them"
        )

    def _items(self, value: Sequence[object]) -> list[object]:
        return [self._child(index, item) for index, item in enumerate(value)]

    def _child(self, key: object, value: object) -> object:
        self._trail.append(key)
        node = self.node(value)
        self._trail.pop()
        return node

    def _container(self, value: Any, encode_items: Callable[[Any], object]) -> object:
        if id(value) in self._open:
            raise CheckpointError(
                f"{format_path(self._root, self._trail)} contains itself, which a checkpoint cannot hold: "
                "remove the cycle in state_dict and rebuild it in load_state_dict"
            )
        if len(self._trail) >= MAX_DEPTH:
            raise CheckpointError(
                f"{format_path(self._root, self._trail[:8])}… is nested deeper than {MAX_DEPTH} levels; "
                "flatten it in state_dict"
            )
        self._open.add(id(value))
        node = encode_items(value)
        self._open.discard(id(value))
        return node

    def _array(self, value: np.ndarray[Any, Any]) -> object:
        if value.dtype.kind not in NUMPY_KINDS:
            raise self._refusal(
                value, f"numpy array of dtype {value.dtype}", "convert it to a numeric dtype or a list"
            )
        return {"$ndarray": self._add(self._sink.add_numpy, value)}

    def _scalar(self, value: np.generic) -> object:
        if value.dtype.kind not in NUMPY_KINDS:
            raise self._refusal(
                value, f"numpy scalar of dtype {value.dtype}", "call .item() on it in state_dict"
            )
        return {"$scalar": [value.dtype.str, _to_base64(value.tobytes())]}

    def _add(self, add: Callable[[Any, str], int], value: object) -> int:
        name = ".".join(str(key) for key in self._trail) or self._root
        try:
            return add(value, self._name_prefix + name)
        except CheckpointError as error:  # add the path
            raise CheckpointError(f"{format_path(self._root, self._trail)} {error}") from None

    def _refusal(self, value: object, what: str | None = None, remedy: str | None = None) -> CheckpointError:
        what = what or f"of type {_type_name(value)}"
        remedy = remedy or _REMEDIES.get(type(value).__name__) or _remedy_for(value)
        return CheckpointError(
            f"{format_path(self._root, self._trail)} is {what}, which a checkpoint cannot hold; {remedy}. "
            f"It can hold {_ALLOWED}"
        )


_REMEDIES = {
    "set": "save it as a sorted list",
    "frozenset": "save it as a sorted list",
    "bytearray": "save it as bytes",
    "complex": "save it as a tuple of two floats",
    "PosixPath": "save it as str",
    "WindowsPath": "save it as str",
}


def _remedy_for(value: object) -> str:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "save a namedtuple as a dict (._asdict())"
    if isinstance(value, np.ndarray):
        return "save it as a plain array (np.asarray)"
    if hasattr(value, "state_dict"):
        return "save its .state_dict()"
    return "save it as plain values in state_dict and rebuild it in load_state_dict"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _encode_int(value: int) -> object:
    return value if -PLAIN_INT <= value <= PLAIN_INT else {"$int": hex(value)}


def _encode_float(value: float) -> object:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> object:
    return value if _is_unicode(value) else {"$str": _to_base64(value.encode("utf-8", "surrogatepass"))}


def _is_unicode(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, e.g. file names that were not UTF-8
        return False
    return True


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: object) -> bytes:
    return base64.b64decode(_expect(text, str), validate=True)


def _expect(value: object, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r:.80}")
    return value


def _decode(node: object, tensors: Sequence[object]) -> object:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((tag, content),) = node.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, content, tensors)
    if any(key.startswith("$") for key in node):
        raise ValueError(f"an object mixes tags and keys: {sorted(node)!r:.200}")
    return {key: _decode(item, tensors) for key, item in node.items()}


def _decode_tagged(tag: str, content: Any, tensors: Sequence[object]) -> object:
    match tag:
        case "$tensor" | "$ndarray":
            row = _expect(content, int)
            if not 0 <= row < len(tensors):
                raise IndexError(f"{tag} {row} is not a row of the tensor table ({len(tensors)} rows)")
            return tensors[row]
        case "$tuple":
            return tuple(_decode(item, tensors) for item in _expect(content, list))
        case "$dict":
            pairs = [
                (_decode(key, tensors), _decode(value, tensors)) for key, value in _expect(content, list)
            ]
            return dict(pairs)
        case "$int":
            return int(_expect(content, str), 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(_expect(content, str)))[0]
        case "$bytes":
            return _from_base64(content)
        case "$str":
            return _from_base64(content).decode("utf-8", "surrogatepass")
        case "$scalar":
            dtype_text, data = _expect(content, list)
            if not _SCALAR_DTYPE.fullmatch(_expect(dtype_text, str)):
                raise ValueError(f"a scalar of dtype {dtype_text!r}")
            dtype = np.dtype(dtype_text)
            (scalar,) = np.frombuffer(_from_base64(data), dtype=dtype, count=1)
            return scalar
    raise ValueError(f"unknown tag {tag!r}")
