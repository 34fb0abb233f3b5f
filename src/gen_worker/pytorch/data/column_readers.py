"""From Arrow columns to tensors where a view is not enough: lists of any length, images, scaling."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from gen_worker.errors import InputError
from gen_worker.pytorch.config import ImageSpec
from gen_worker.pytorch.image_folder import NUM_CHANNELS, decode_image, require_pillow

Read = Callable[[pa.Array], torch.Tensor]


class Finish:
    """Sets device, dtype, shape and scale of one column. Never writes to the batch's memory."""

    __slots__ = (
        "_crop",
        "_device",
        "_dtype",
        "_factor",
        "_has_changes",
        "_is_fresh",
        "_is_remote",
        "_memory_format",
        "_offset",
        "_one_hot",
        "_shape",
    )

    def __init__(
        self,
        *,
        device: str,
        dtype: torch.dtype,
        source_dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        factor: torch.Tensor | float | None = None,
        offset: torch.Tensor | float | None = None,
        one_hot: int | None = None,
        crop: int | None = None,
        channels_last: bool = False,
    ) -> None:
        self._device = torch.device(device)
        self._dtype = dtype
        self._is_remote = self._device.type != "cpu"
        # A conversion makes a copy, which may be changed in place.
        self._is_fresh = self._is_remote or dtype != source_dtype
        self._shape = None if shape is None else (-1, *shape)
        self._factor = self._placed(factor)
        self._offset = self._placed(offset)
        self._one_hot = one_hot
        self._crop = crop
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._has_changes = factor is not None or offset is not None

    def _placed(self, value: torch.Tensor | float | None) -> torch.Tensor | float | None:
        if isinstance(value, torch.Tensor):
            return value.to(self._device, self._dtype) if value.ndim else float(value)
        return value

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._crop is not None:
            tensor = tensor[:, : self._crop]
        if self._is_remote:
            tensor = tensor.to(self._device, non_blocking=True)  # before the conversion: fewer bytes
        if self._one_hot is not None:
            tensor = torch.nn.functional.one_hot(tensor.to(torch.int64), self._one_hot)
        if tensor.ndim == 4:
            tensor = tensor.to(self._dtype, memory_format=self._memory_format)
        else:
            tensor = tensor.to(self._dtype)
        if self._shape is not None:
            tensor = tensor.reshape(self._shape if self._one_hot is None else (*self._shape, self._one_hot))
        if self._has_changes:
            if self._factor is not None:
                tensor = tensor.mul_(self._factor) if self._is_fresh else tensor * self._factor
            if self._offset is not None:
                is_ours = self._is_fresh or self._factor is not None
                tensor = tensor.add_(self._offset) if is_ours else tensor + self._offset
        if tensor.ndim == 4:
            tensor = tensor.contiguous(memory_format=self._memory_format)
        return tensor


def padded_lists(name: str, length: int, pad_id: int) -> Read:
    """The first `length` values of each list; shorter lists are padded with `pad_id`."""
    positions = np.arange(length)

    def read(column: pa.Array) -> torch.Tensor:
        elements, starts, lengths = _lists(column, name)
        if elements.null_count:
            raise _null_fault(name)
        values = elements.to_numpy(zero_copy_only=False)
        index = starts[:, None] + positions
        is_short = not bool((lengths >= length).all())
        if is_short:
            index = np.minimum(index, max(len(values) - 1, 0))
        found = (values[index] if len(values) else np.zeros_like(index)).astype(np.int64, copy=False)
        if is_short:
            found[positions >= lengths[:, None]] = pad_id
        return torch.from_numpy(found)

    return read


def dense_lists(name: str, num_values: int) -> Read:
    """Variable-length lists that must all have one length; InputError otherwise."""

    def read(column: pa.Array) -> torch.Tensor:
        num_rows = len(column)
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            _, _, lengths = _lists(column, name)
            if len(lengths) and bool((lengths != lengths[0]).any()):
                other = int(lengths[int((lengths != lengths[0]).argmax())])
                raise InputError(
                    f"column {name!r}: a batch has lists of {int(lengths[0])} and {other} elements, but `shape` needs"
                    " equal lengths: set `sequence_length`, or fix the data"
                )
            column = column.flatten()
        while pa.types.is_fixed_size_list(column.type):
            column = column.flatten()
        if len(column) != num_rows * num_values:
            raise InputError(
                f"column {name!r}: a row has {len(column) / max(num_rows, 1):g} values, but `shape` needs {num_values}"
            )
        if column.null_count:
            raise _null_fault(name)
        return torch.from_numpy(_writable(column.to_numpy(zero_copy_only=False))).view(num_rows, num_values)

    return read


def _lists(column: pa.Array, name: str) -> tuple[pa.Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(all values, start of each list, length of each list)."""
    if column.null_count:
        raise _null_fault(name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values, offsets[:-1], np.diff(offsets)


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """torch warns about read-only arrays."""
    return array if array.flags.writeable else array.copy()


def _null_fault(name: str) -> InputError:
    return InputError(f"column {name!r} has nulls: fill or drop them when the dataset is written")


def read_images(name: str, spec: ImageSpec, *, is_record: bool) -> Read:
    """Images in any format that Pillow reads, as uint8 (rows, channels, height, width)."""
    require_pillow(f"decoding the images of column {name!r}")
    height, width = spec.size
    pool = ThreadPoolExecutor(spec.threads, thread_name_prefix="decode") if spec.threads > 1 else None

    def decode(item: tuple[str, bytes | None]) -> npt.NDArray[np.uint8]:
        where, content = item
        if content is None:
            raise _null_fault(name)
        return decode_image(content, size=(height, width), mode=spec.mode, where=where)

    def read(column: pa.Array) -> torch.Tensor:
        names = [f"column {name!r}: row {number} of a batch" for number in range(len(column))]
        if is_record:
            if column.type.get_field_index("path") >= 0:
                paths = column.field("path").to_pylist()
                names = [path or other for path, other in zip(paths, names, strict=True)]
            column = column.field("bytes")
        items = zip(names, column.to_pylist(), strict=True)
        images = list(map(decode, items) if pool is None else pool.map(decode, items))
        if not images:
            return torch.empty((0, NUM_CHANNELS[spec.mode], height, width), dtype=torch.uint8)
        stacked = torch.from_numpy(np.stack(images))
        return stacked.unsqueeze(1) if spec.mode == "L" else stacked.permute(0, 3, 1, 2)

    return read
