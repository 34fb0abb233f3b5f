"""Arrow's types by the numbers that are in them, and numbers between numpy and Arrow without Python values."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
OTHER_VALUES = frozenset(("string", "binary", "any"))  # than numbers, of `dtype_name`


def take_apart(data_type: pa.DataType) -> tuple[pa.DataType, tuple[int | None, ...]]:
    """(type of a value, dims of a row)."""
    if isinstance(data_type, pa.FixedShapeTensorType):
        return data_type.value_type, tuple(data_type.shape)
    if isinstance(data_type, pa.BaseExtensionType):
        return take_apart(data_type.storage_type)
    dims: list[int | None] = []
    while is_list(data_type):
        dims.append(data_type.list_size if pa.types.is_fixed_size_list(data_type) else None)
        data_type = data_type.value_type
    return data_type, tuple(dims)


def is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_fixed_size_list(data_type) or types.is_list(data_type) or types.is_large_list(data_type)
    )


def dtype_name(data_type: pa.DataType) -> str:
    types = pa.types
    if types.is_dictionary(data_type):
        data_type = data_type.value_type
    if types.is_integer(data_type) or types.is_floating(data_type) or types.is_boolean(data_type):
        return str(np.dtype(data_type.to_pandas_dtype()))
    if types.is_string(data_type) or types.is_large_string(data_type):
        return "string"
    if types.is_binary(data_type) or types.is_large_binary(data_type) or is_file(data_type):
        return "binary"
    return "any"


def is_file(data_type: pa.DataType) -> bool:
    """A record of `bytes` and perhaps `path`, as datasets of images have it."""
    if not pa.types.is_struct(data_type):
        return False
    index = data_type.get_field_index("bytes")
    return index >= 0 and bool(pa.types.is_binary(data_type.field(index).type))


def is_number(data_type: pa.DataType) -> bool:
    return dtype_name(data_type) not in OTHER_VALUES and not pa.types.is_dictionary(data_type)


class NumberType:
    """A type of numbers, or of lists of them: what of it does not depend on the rows, found out once."""

    __slots__ = ("_extensions", "_is_bool", "_lists", "_value_type", "dims", "dtype")

    def __init__(self, data_type: pa.DataType) -> None:
        """Of one that `is_number` by its values."""
        self._value_type, self.dims = take_apart(data_type)
        self.dtype = np.dtype(self._value_type.to_pandas_dtype())
        self._is_bool = pa.types.is_boolean(self._value_type)
        self._extensions: list[pa.DataType] = []  # the innermost first
        while isinstance(data_type, pa.BaseExtensionType):
            self._extensions.insert(0, data_type)
            data_type = data_type.storage_type
        self._lists: list[tuple[pa.DataType, bool, type[np.int32 | np.int64]]] = []  # the innermost first
        while is_list(data_type):
            width = np.int64 if pa.types.is_large_list(data_type) else np.int32
            self._lists.insert(0, (data_type, pa.types.is_fixed_size_list(data_type), width))
            data_type = data_type.value_type

    def view(self, array: pa.Array) -> Array | None:
        """The values of an array of this type, row after row, without a copy. None where some are null, where they are
        bits, or in lists of any length."""
        if self._is_bool or None in self.dims:
            return None
        flat = array.storage if isinstance(array, pa.ExtensionArray) else array
        for list_type, _, _ in reversed(self._lists):
            if flat.null_count:
                return None
            size = list_type.list_size
            flat = flat.values.slice(flat.offset * size, len(flat) * size)
        if flat.null_count:
            return None
        return _elements(flat, self.dtype).reshape(len(array), *self.dims)

    def wrap(self, values: Array, memory: pa.Buffer) -> pa.Array:
        """An array of this type over memory that holds its values, row after row."""
        count = values.size
        if self._is_bool:
            memory = pa.py_buffer(np.packbits(values, bitorder="little"))
        array = pa.Array.from_buffers(self._value_type, count, [None, memory])
        # A tensor of several dimensions has one list of all of them.
        sizes = values.shape[1:] if len(self._lists) == values.ndim - 1 else (math.prod(values.shape[1:]),)
        for (list_type, is_fixed, width), size in zip(self._lists, reversed(sizes), strict=True):
            count = count // size if size else len(values)
            if is_fixed:
                array = pa.Array.from_buffers(list_type, count, [None], children=[array])
                continue
            offsets = pa.py_buffer(np.arange(0, (count + 1) * size, size or 1, dtype=width)[: count + 1])
            array = pa.Array.from_buffers(list_type, count, [None, offsets], children=[array])
        for extension in self._extensions:
            array = pa.ExtensionArray.from_storage(extension, array)
        return array


def _elements(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    """As `to_numpy`, which imports pandas where it is installed."""
    memory = array.buffers()[1]
    if memory is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(memory, dtype, len(array), array.offset * dtype.itemsize)


def number_type_of(data_type: pa.DataType) -> NumberType | None:
    """None where its values are no numbers."""
    return NumberType(data_type) if is_number(take_apart(data_type)[0]) else None


@lru_cache(maxsize=256)
def number_type_of_numpy(dtype: np.dtype[Any], dims: tuple[int, ...]) -> NumberType:
    data_type = pa.from_numpy_dtype(dtype)
    for size in reversed(dims):
        data_type = pa.list_(data_type, size)
    return NumberType(data_type)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, pa.Buffer]:
    """New memory, aligned to a cache line."""
    memory = pa.allocate_buffer(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(memory, dtype=dtype).reshape(shape), memory
