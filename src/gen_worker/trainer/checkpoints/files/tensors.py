"""Tensors and arrays -> specs and bytes, and back.

A storage is the span of bytes that the saved tensors of one allocation cover: a small view of a large tensor costs only
its span, and tensors that share memory share a storage.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gen_worker.contract.checkpoints.meta import CheckpointMeta, TensorEntry
from gen_worker.errors import CheckpointError
from gen_worker.trainer.checkpoints.files.state_tree import NUMPY_KINDS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SMALL = 1 << 18  # below it a plain copy is quicker than asking torch, which would use its threads


class TensorSpec(NamedTuple):
    """The layout of one tensor, without its values. Strides and offset in bytes.

    A tuple: every save makes one per tensor and compares them with the last save.
    """

    name: str
    kind: Literal["torch", "numpy"]
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int  # from the start of its storage
    requires_grad: bool
    is_state: bool  # of the author's state, hence under the non-finite gate

    @property
    def is_contiguous(self) -> bool:
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(slots=True)
class _Allocation:
    """Memory of saved tensors. `low` and `high` are bytes from its base."""

    owner: Any
    kind: Literal["torch", "numpy"]
    address: int
    low: int
    high: int
    alignment: int

    @property
    def start(self) -> int:
        """`low`, rounded down so that every view begins at a whole number of its elements."""
        return self.low // self.alignment * self.alignment


class TensorTable:
    """Collects the tensors of one checkpoint; `finish` returns specs and storages, `copy_into` copies the bytes."""

    def __init__(self) -> None:
        self.is_state = True  # the trees that come after the state are not scanned for non-finite values
        self._specs: list[
            TensorSpec
        ] = []  # their offsets count from the base of the allocation until `finish`
        self._names: set[str] = set()
        self._allocations: list[_Allocation] = []
        self._allocation_by_key: dict[tuple[Hashable, ...], int] = {}

    def add_torch(self, tensor: Any, name: str) -> int:
        torch = sys.modules["torch"]
        _refuse_odd_tensor(torch, tensor)
        requires_grad: bool = tensor.requires_grad
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        itemsize: int = tensor.element_size()
        shape = tuple(tensor.shape)
        strides = tuple(stride * itemsize for stride in tensor.stride())
        low = tensor.storage_offset() * itemsize
        if 0 in shape:  # no bytes: nothing to share, and no address to share it by
            low = 0
            allocation = self._allocation(("empty", len(self._specs)), None, "torch", 0, 0, 0, itemsize)
        else:
            high = (
                low + itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            )
            storage = tensor.untyped_storage()
            # The size too: two storages can begin at one address (torch.from_numpy of a slice and of the whole).
            key = (tensor.device, storage.nbytes(), address := storage.data_ptr())
            allocation = self._allocation(key, storage, "torch", address, low, high, itemsize)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._append(name, "torch", dtype, itemsize, shape, strides, allocation, low, requires_grad)

    def add_numpy(self, array: np.ndarray[Any, Any], name: str) -> int:
        itemsize = array.dtype.itemsize
        if array.size:
            root = array
            while isinstance(root.base, np.ndarray):
                root = root.base
            base, _ = byte_bounds(root)
            start, end = byte_bounds(array)
            low, high = start - base, end - base
            allocation = self._allocation(("numpy", base), root, "numpy", base, low, high, itemsize)
            first = (
                array.__array_interface__["data"][0] - base
            )  # with negative strides not the lowest address
        else:
            first = 0
            allocation = self._allocation(("empty", len(self._specs)), None, "numpy", 0, 0, 0, itemsize)
        return self._append(
            name,
            "numpy",
            array.dtype.str,
            itemsize,
            array.shape,
            array.strides,
            allocation,
            first,
            False,
        )

    def finish(self) -> tuple[tuple[TensorSpec, ...], tuple[int, ...]]:
        """(specs in row order, bytes of each storage)."""
        starts = [item.start for item in self._allocations]
        specs = tuple(
            spec._replace(offset=spec.offset - start) if (start := starts[spec.storage]) else spec
            for spec in self._specs
        )
        return specs, tuple(item.high - start for item, start in zip(self._allocations, starts, strict=True))

    def copy_into(self, image: Bytes, storage_offsets: Sequence[int]) -> None:
        """Copy every storage into the file image; blocks until done."""
        torch = sys.modules.get("torch")
        image_address = image.ctypes.data
        target = None
        devices = []
        for item, offset in zip(self._allocations, storage_offsets, strict=True):
            count = item.high - item.start
            if not count:
                continue
            is_remote = item.kind == "torch" and item.owner.device.type != "cpu"
            if not is_remote and (item.kind == "numpy" or count < _SMALL):
                ctypes.memmove(image_address + offset, item.address + item.start, count)
                continue
            assert torch is not None
            if target is None:
                target = torch.from_numpy(image)
            source = torch.empty(0, dtype=torch.uint8, device=item.owner.device)
            source.set_(item.owner, item.start, (count,), (1,))
            target[offset : offset + count].copy_(source, non_blocking=is_remote)
            if is_remote and item.owner.device not in devices:
                devices.append(item.owner.device)
        for device in devices:
            assert torch is not None
            torch.accelerator.synchronize(device)

    def _allocation(
        self,
        key: tuple[Hashable, ...],
        owner: Any,
        kind: Literal["torch", "numpy"],
        address: int,
        low: int,
        high: int,
        itemsize: int,
    ) -> int:
        number = self._allocation_by_key.get(key)
        if number is None:
            number = self._allocation_by_key[key] = len(self._allocations)
            self._allocations.append(_Allocation(owner, kind, address, low, high, itemsize))
        else:
            item = self._allocations[number]
            item.low, item.high = min(item.low, low), max(item.high, high)
            item.alignment = math.lcm(item.alignment, itemsize)
        return number

    def _append(
        self,
        name: str,
        kind: Literal["torch", "numpy"],
        dtype: str,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        allocation: int,
        offset: int,
        requires_grad: bool,
    ) -> int:
        unique, number = name, 2
        while unique in self._names:
            unique, number = f"{name}~{number}", number + 1
        self._names.add(unique)
        self._specs.append(
            TensorSpec(
                unique,
                kind,
                dtype,
                itemsize,
                shape,
                strides,
                allocation,
                offset,
                requires_grad,
                self.is_state,
            )
        )
        return len(self._specs) - 1


def _refuse_odd_tensor(torch: Any, tensor: Any) -> None:
    """The message continues a path: `state["x"] is a sparse tensor, ...`."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise CheckpointError(
            f"is a {name}, a subclass of Tensor that would be lost; save plain tensors of it"
        )
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f"is a sparse tensor ({tensor.layout}); save .to_dense(), or its indices and values"
        )
    if tensor.is_quantized:
        raise CheckpointError("is a quantized tensor; save .int_repr() with its scale and zero point")
    if tensor.device.type == "meta":
        raise CheckpointError("is on the meta device and has no values; materialise it before saving")


class StorageBuffers:
    """Fresh memory for every storage of a checkpoint, to be filled from the file, then seen as tensors."""

    def __init__(self, meta: CheckpointMeta, source: str) -> None:
        self._source = source
        self._tensors = meta.tensors
        self._offsets = [storage.offset for storage in meta.storages]
        kinds = {tensor.storage: tensor.kind for tensor in meta.tensors}
        self._torch_memory: dict[int, Any] = {}
        self.bytes: list[Bytes] = []
        allocate = _torch_allocator(source) if "torch" in kinds.values() else None
        for number, storage in enumerate(meta.storages):
            if kinds.get(number) == "torch":
                assert allocate is not None
                memory = self._torch_memory[number] = allocate(storage.size_bytes)
                self.bytes.append(memory.numpy())
            else:
                self.bytes.append(np.empty(storage.size_bytes, np.uint8))

    def build(self) -> list[object]:
        """The tensors and arrays, in row order; tensors of one storage share its memory again."""
        return [self._build(entry) for entry in self._tensors]

    def _build(self, entry: TensorEntry) -> object:
        start = entry.offset - self._offsets[entry.storage]
        try:
            if entry.kind == "numpy":
                return self._build_numpy(entry, start)
            return self._build_torch(entry, start)
        except (ValueError, TypeError, RuntimeError, OverflowError, AttributeError, KeyError) as error:
            raise CheckpointError(
                f"{self._source}: tensor {entry.name!r} cannot be built: {error}"
            ) from error

    def _build_numpy(self, entry: TensorEntry, start: int) -> object:
        dtype = np.dtype(entry.dtype)
        if dtype.kind not in NUMPY_KINDS:
            raise ValueError(f"dtype {entry.dtype!r}")
        _check_span(entry, start, dtype.itemsize, self.bytes[entry.storage].size)
        return np.ndarray(entry.shape, dtype, self.bytes[entry.storage].data, start, entry.strides)

    def _build_torch(self, entry: TensorEntry, start: int) -> object:
        torch = sys.modules["torch"]
        dtype = getattr(torch, entry.dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry.dtype!r} is not a dtype")
        itemsize: int = dtype.itemsize
        if start % itemsize or any(stride % itemsize for stride in entry.strides):
            raise ValueError(
                f"offset {start} and strides {entry.strides} are not multiples of {itemsize} bytes"
            )
        _check_span(entry, start, itemsize, self.bytes[entry.storage].size)
        storage = self._torch_memory[entry.storage].untyped_storage()
        strides = tuple(stride // itemsize for stride in entry.strides)
        tensor = torch.empty(0, dtype=dtype).set_(storage, start // itemsize, entry.shape, strides)
        return tensor.requires_grad_() if entry.requires_grad else tensor


def _torch_allocator(source: str) -> Callable[[int], Any]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"{source} holds torch tensors, but torch is not installed here") from error
    return lambda size_bytes: torch.empty(size_bytes, dtype=torch.uint8)


def _check_span(entry: TensorEntry, start: int, itemsize: int, available: int) -> None:
    if 0 in entry.shape:
        return
    steps = [(size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    high = start + itemsize + sum(step for step in steps if step > 0)
    if low < 0 or high > available:
        raise ValueError(f"bytes {low}..{high} are outside its storage of {available} bytes")
