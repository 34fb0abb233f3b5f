"""A state comes back from its JSON tree exactly, or is refused with its place."""

import contextlib
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.files.state_tree import decode, encode

# A busy machine is slow; that is no fault of the code.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Sink:
    """Keeps the tensors themselves."""

    def __init__(self):
        self.tensors = []
        self.names = []

    def _add(self, value, name):
        self.tensors.append(value)
        self.names.append(name)
        return len(self.tensors) - 1

    add_torch = add_numpy = _add


def through_json(value):
    sink = Sink()
    text = msgspec.json.encode(encode(value, sink))
    return decode(msgspec.json.decode(text), sink.tensors)


def identical(a, b):
    """Equality that also tells types, -0.0, and every NaN apart."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    return a == b


any_text = st.text(st.characters(), max_size=8) | st.sampled_from(["$", "$tensor", "$dict", "\ud800x"])
floats = st.floats(allow_nan=True, allow_infinity=True, width=64)
plain = st.none() | st.booleans() | st.integers() | floats | any_text | st.binary(max_size=8)
scalars = st.one_of(
    st.integers(-128, 127).map(np.int8),
    floats.map(np.float64),
    st.floats(width=32, allow_nan=True).map(np.float32),
    st.booleans().map(np.bool_),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.integers(-(2**62), 2**62).map(lambda n: np.datetime64(n, "ns")),
    st.complex_numbers(width=64, allow_nan=False).map(np.complex64),
)
key_parts = any_text | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.none()
keys = st.recursive(key_parts, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
trees = st.recursive(
    plain | scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(any_text, inner, max_size=4),
    ),
    max_leaves=12,
)


@unhurried
@given(trees)
def test_every_tree_comes_back_exactly_through_json_text(tree):
    assert identical(through_json(tree), tree)


@pytest.mark.parametrize(
    "value",
    [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 0.1, 2**53 + 1, -(2**200), 1.0, True],
)
def test_numbers_keep_every_bit_and_their_type(value):
    assert identical(through_json(value), value)


def test_a_nan_keeps_its_payload():
    (value,) = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))
    assert struct.pack(">d", through_json(value)).hex() == "7ff800000000beef"


def test_ordered_and_default_dicts_come_back_as_dicts_in_their_order():
    value = OrderedDict([("b", 1), ("a", defaultdict(list, {"x": [2]}))])
    restored = through_json(value)
    assert type(restored) is dict
    assert list(restored) == ["b", "a"]
    assert restored["a"] == {"x": [2]}
    assert type(restored["a"]) is dict


def test_tensors_are_named_by_their_place():
    sink = Sink()
    weight, moment = torch.ones(2), np.ones(3)
    tree = encode({"model": {"fc.weight": weight}, "optimizer": {"state": {0: {"exp_avg": moment}}}}, sink)
    assert sink.names == ["model.fc.weight", "optimizer.state.0.exp_avg"]
    assert decode(tree, sink.tensors)["model"]["fc.weight"] is weight


Point = namedtuple("Point", "x y")


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({1, 2}, "sorted list"),
        (frozenset(), "sorted list"),
        (Point(1, 2), "_asdict"),
        (Custom(), "load_state_dict"),
        (bytearray(b"x"), "as bytes"),
        (Path("x"), "as str"),
        (torch.nn.Linear(1, 1), ".state_dict()"),
        (np.array(["a"]), "numeric dtype"),
        (np.array([object()]), "numeric dtype"),
        (np.str_("a"), ".item()"),
        (np.ma.masked_array([1.0], mask=[True]), "np.asarray"),
        (1j, "two floats"),
        (len, "plain values"),
    ],
)
def test_what_cannot_be_restored_is_refused_with_path_type_and_advice(value, advice):
    with pytest.raises(CheckpointError) as caught:
        encode({"optimizer": {"state": {0: {"exp_avg": [value]}}}}, Sink())
    message = str(caught.value)
    assert message.startswith('state["optimizer"]["state"][0]["exp_avg"][0] is ')
    assert advice in message
    assert type(value).__name__ in message or "dtype" in message


def test_a_key_of_another_type_is_refused_with_its_path():
    with pytest.raises(CheckpointError, match=r'^state\["groups"\] has a key .* of type bytes'):
        encode({"groups": {b"x": 1}}, Sink())


def test_a_cycle_is_refused_with_its_path():
    value = {"a": []}
    value["a"].append(value)
    with pytest.raises(CheckpointError, match=r'^state\["a"\]\[0\] contains itself'):
        encode(value, Sink())


def test_the_same_list_twice_is_not_a_cycle():
    shared = [1]
    assert through_json({"a": shared, "b": shared}) == {"a": [1], "b": [1]}


def test_depth_beyond_the_limit_is_refused_rather_than_overflowing_the_stack():
    value = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(CheckpointError, match="nested deeper than"):
        encode(value, Sink())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$tensor",
                    "$ndarray",
                    "$tuple",
                    "$dict",
                    "$int",
                    "$float",
                    "$bytes",
                    "$str",
                    "$scalar",
                    "$new",
                    "a",
                ]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


@unhurried
@given(json_values)
@example({"$scalar": {"a": None, "$tensor": None}})
@example({"$scalar": ["a", ""]})
@example({"$scalar": ["<i3", "AAAA"]})
def test_a_malformed_tree_is_a_checkpoint_error_and_nothing_else(node):
    with contextlib.suppress(CheckpointError):
        decode(node, [1.0])


@pytest.mark.parametrize(
    "node", [{"$new": 1}, {"$tensor": 7}, {"$tensor": -1}, {"$tensor": "0"}, {"$tuple": 3}]
)
def test_unknown_tags_and_dangling_references_are_refused(node):
    with pytest.raises(CheckpointError):
        decode({"x": node}, [1.0])
