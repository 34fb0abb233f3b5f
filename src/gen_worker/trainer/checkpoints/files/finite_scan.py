"""Finds float tensors of a staged image with NaN, or with an infinity that was not there at the start."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from gen_worker.trainer.checkpoints.files.dtypes import FLOAT_NANS, FLOAT_PATTERNS, NUMPY_FLOATS
from gen_worker.trainer.checkpoints.files.format import FloatRange

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_BLOCK = 1 << 18  # elements checked together: temporaries stay in the cache


def find_non_finite(image: Bytes, ranges: Iterable[FloatRange]) -> list[str]:
    with np.errstate(all="ignore"):
        return [item.name for item in ranges if not _is_finite(image, item)]


def _is_finite(image: Bytes, item: FloatRange) -> bool:
    if item.dtype in FLOAT_PATTERNS:
        unsigned, mask, limit = FLOAT_PATTERNS[item.dtype]
        values = _view(image, item, np.dtype(unsigned), is_complex=item.dtype == "complex32")
        if item.may_be_infinite and item.dtype != "float8_e4m3fn":  # which has no infinity
            limit += 1  # infinity has the smallest pattern of those that are not finite
        return all(int((block & values.dtype.type(mask)).max()) < limit for block in _blocks(values))
    if item.dtype in FLOAT_NANS:
        values = _view(image, item, np.dtype("|u1"))
        return not any(bool((block == FLOAT_NANS[item.dtype]).any()) for block in _blocks(values))
    is_complex = item.dtype.startswith("complex")
    values = _view(image, item, np.dtype(NUMPY_FLOATS.get(item.dtype, item.dtype)), is_complex=is_complex)
    # A finite sum proves that all values are finite. An infinite one may be an overflow: check every value.
    if np.isfinite(values.sum()):
        return True
    if item.may_be_infinite:
        return not any(bool(np.isnan(block).any()) for block in _blocks(values))
    return all(bool(np.isfinite(block).all()) for block in _blocks(values))


def _view(
    image: Bytes, item: FloatRange, dtype: np.dtype[Any], *, is_complex: bool = False
) -> np.ndarray[Any, Any]:
    shape, strides = item.shape, item.strides
    if is_complex:  # a pair of real numbers
        shape, strides = (*shape, 2), (*strides, dtype.itemsize)
    values = np.ndarray(shape, dtype, image.data, item.offset, strides)
    return values.reshape(-1) if values.flags.c_contiguous else values


def _blocks(values: np.ndarray[Any, Any]) -> Iterable[np.ndarray[Any, Any]]:
    flat = values.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK]
