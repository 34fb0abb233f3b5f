"""Record batches as torch tensors: views of the Arrow memory if the types allow it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from gen_worker.errors import InputError

if TYPE_CHECKING:
    import torch

# Compared by id: a pyarrow type hashes by its printed form, which costs more than the view itself.
_FIXED_SIZE_LIST = pa.list_(pa.int8(), 1).id
_BOOL = pa.bool_().id
_NUMBERS = frozenset(
    make().id
    for make in (
        *(pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64),
        *(pa.float16, pa.float32, pa.float64),
    )
)


def batch_to_torch(batch: pa.RecordBatch, columns: Sequence[str] | None = None) -> "dict[str, torch.Tensor]":
    """Tensors that share the batch's memory: numbers as (rows,), fixed-size lists as (rows, size, …).

    Treat them as read-only: the memory belongs to the batch, and perhaps to a mapped file. Booleans are copied (Arrow
    stores them as bits). InputError if a column has nulls or is not numeric.
    """
    tensors = {}
    newest = newest_slice.place
    of_block, start = newest[1:] if newest is not None and newest[0] is batch else (None, 0)
    for name in batch.schema.names if columns is None else columns:
        if of_block is not None and (whole := of_block.get(name)) is not None:
            tensors[name] = whole[start : start + batch.num_rows]
            continue
        try:
            column = batch.column(name)
        except KeyError:
            raise InputError(
                f"no column {name!r} in the batch: it has {', '.join(batch.schema.names)}"
            ) from None
        tensors[name] = _view(column, name)
    return tensors


class BlockTensors:
    """The columns of a decoded block as tensors, made with the first batch that is cut from it."""

    __slots__ = ("_rows", "_tensors")

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._tensors: dict[str, torch.Tensor | None] = {}

    def get(self, name: str) -> "torch.Tensor | None":
        """None where only each batch by itself can say: it may have no nulls, and its booleans are its own copy."""
        try:
            return self._tensors[name]
        except KeyError:
            tensor = self._tensors[name] = self._make(name)
            return tensor

    def _make(self, name: str) -> "torch.Tensor | None":
        column = self._rows.column(name) if name in self._rows.schema.names else None
        data_type = None if column is None else column.type
        while data_type is not None and data_type.id not in _NUMBERS:
            if isinstance(data_type, pa.BaseExtensionType):
                data_type = data_type.storage_type
            else:
                data_type = data_type.value_type if data_type.id == _FIXED_SIZE_LIST else None
        if data_type is None:
            return None
        try:
            return _view(column, name)
        except InputError:
            return None


class NewestSlice:
    """The newest batch that a feed cut from a block: (batch, tensors of the block, first row).

    Its tensors are slices of those of the block. To find that out from the batch itself takes three times as long. Any
    other batch takes that way: of a second feed that is read in turns, of a thread that reads ahead.
    """

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place: tuple[pa.RecordBatch, BlockTensors, int] | None = None


newest_slice = NewestSlice()


def _view(column: pa.Array, name: str) -> "torch.Tensor":
    data_type = column.type
    type_id = data_type.id
    if type_id in _NUMBERS:
        return _rows(column, column.offset, len(column), (), name, column)
    if type_id == _FIXED_SIZE_LIST:
        return _list_view(column, name, column)
    if type_id == _BOOL:
        if column.null_count:
            raise _null_fault(column, name, "nulls")
        return _copy_bools(column)
    if isinstance(data_type, pa.FixedShapeTensorType):
        tensor = _list_view(column.storage, name, column).view(len(column), *data_type.shape)
        axes = data_type.permutation
        return tensor.permute(0, *(axis + 1 for axis in axes)) if axes else tensor
    if isinstance(data_type, pa.BaseExtensionType):
        return _view(column.storage, name)
    raise InputError(f"column {name!r} ({data_type}) cannot be a tensor: {_remedy(data_type)}")


def _list_view(column: pa.Array, name: str, whole: pa.Array) -> "torch.Tensor":
    num_rows = len(column)
    shape: list[int] = []
    start, stop = 0, num_rows
    while (data_type := column.type).id == _FIXED_SIZE_LIST:
        if column.null_count:
            raise _null_fault(whole, name, "nulls")
        size, offset = data_type.list_size, column.offset
        start, stop = (start + offset) * size, (stop + offset) * size
        shape.append(size)
        column = column.values  # ignores the slice, which start and stop hold
    if data_type.id in _NUMBERS:
        return _rows(column, column.offset + start, num_rows, tuple(shape), name, whole)
    if data_type.id == _BOOL:
        column = column.slice(start, stop - start)
        if column.null_count:
            raise _null_fault(whole, name, "nulls among its elements")
        return _copy_bools(column).view(num_rows, *shape)
    raise InputError(f"column {name!r} ({whole.type}) cannot be a tensor: {_remedy(data_type)}")


# The batches of a row group share its buffers. The tensor of the whole buffer is kept, so that the next batch costs a
# slice, not a conversion. One entry per column name, replaced with the next row group. It keeps its buffers alive, so
# that their addresses are not reused. None: the buffer has nulls.
_whole_buffers: "dict[str, tuple[tuple[object, ...], tuple[object, ...], torch.Tensor | None]]" = {}


def _rows(
    values: pa.Array, start: int, num_rows: int, shape: tuple[int, ...], name: str, whole: pa.Array
) -> "torch.Tensor":
    """`num_rows` rows of `shape`, from element `start` of the buffer of `values`, which are numbers."""
    per_row = math.prod(shape)
    buffers = validity, data = values.buffers()
    if data is not None and num_rows and per_row and not start % per_row:
        key = data.address, data.size, validity and validity.address, values.type.id, shape
        known = _whole_buffers.get(name)
        if known is None or known[0] != key:
            known = _whole_buffers[name] = key, buffers, _whole_tensor(values.type, validity, data, shape)
        tensor = known[2]
        if tensor is not None:
            first = start // per_row
            return tensor[first : first + num_rows]
    part = values.slice(start - values.offset, num_rows * per_row)
    if part.null_count:
        raise _null_fault(whole, name, "nulls among its elements" if shape else "nulls")
    return _convert(part).view(num_rows, *shape)


def _whole_tensor(
    data_type: pa.DataType, validity: pa.Buffer | None, data: pa.Buffer, shape: tuple[int, ...]
) -> "torch.Tensor | None":
    """All rows of a buffer as one tensor; None if any of them is null."""
    count = data.size * 8 // data_type.bit_width
    if validity is not None:
        if validity.size * 8 < count:
            return None
        if pa.Array.from_buffers(data_type, count, [validity, data]).null_count:
            return None
    num_rows = count // math.prod(shape)
    elements = pa.Array.from_buffers(data_type, num_rows * math.prod(shape), [None, data])
    return _convert(elements).view(num_rows, *shape)


def _convert(values: pa.Array) -> "torch.Tensor":
    from torch.utils.dlpack import from_dlpack

    tensor: torch.Tensor = from_dlpack(values)
    return tensor


def _copy_bools(column: pa.Array) -> "torch.Tensor":
    import torch

    return torch.from_numpy(column.to_numpy(zero_copy_only=False))


def _null_fault(column: pa.Array, name: str, what: str) -> InputError:
    return InputError(
        f"column {name!r} ({column.type}) has {what} and cannot be a tensor: fill or drop them when the dataset is written,"
        " or use pyarrow.compute.fill_null in prepare_batch"
    )


def _remedy(data_type: pa.DataType) -> str:
    if pa.types.is_dictionary(data_type):
        return "use column.indices in prepare_batch, or write the codes as an integer column"
    if pa.types.is_temporal(data_type) or pa.types.is_decimal(data_type):
        return "cast it to an integer or float column when the dataset is written"
    if pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        return "its rows have different lengths: pad them to a fixed-size list, or build the tensor in prepare_batch"
    if pa.types.is_struct(data_type):
        return "write its fields as columns of their own"
    return "exclude it with columns=[…] and read it from the record batch, or write it as numbers (token ids)"
