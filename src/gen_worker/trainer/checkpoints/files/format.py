"""The layout of a checkpoint's data file: a pure function of the tensors' specs.

It says which bytes are constant, where each storage begins, and which CRC32s the writer fills in. `.pt` is in
`archive`, `.safetensors` is here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gen_worker.contract.checkpoints.meta import Format, StorageEntry, TensorEntry
from gen_worker.trainer.checkpoints.files.archive import CrcRecord, build_archive
from gen_worker.trainer.checkpoints.files.dtypes import FLOAT_DTYPES, SAFETENSORS_NAMES, torch_name
from gen_worker.trainer.checkpoints.files.tensors import TensorSpec

SUFFIXES: dict[Format, str] = {"pt": ".pt", "safetensors": ".safetensors"}


class FloatRange(msgspec.Struct, frozen=True, array_like=True):
    """A float tensor of the state, to be checked for non-finite values. Offset and strides in bytes.

    `may_be_infinite`: it was infinite after `configure`, like a mask; then only NaN is a fault.
    """

    name: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    may_be_infinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A data file without the bytes of its storages and their checksums."""

    size_bytes: int
    constants: tuple[tuple[int, bytes], ...]
    storage_offsets: tuple[int, ...]
    crcs: tuple[CrcRecord, ...]
    floats: tuple[FloatRange, ...]
    storages: tuple[StorageEntry, ...]
    tensors: tuple[TensorEntry, ...]


def build_layout(
    file_format: Format, specs: Sequence[TensorSpec], storage_sizes: Sequence[int]
) -> FileLayout:
    crcs: tuple[CrcRecord, ...] = ()
    if file_format == "pt":
        archive = build_archive(specs, storage_sizes)
        size_bytes, constants, offsets, crcs = archive
    else:
        size_bytes, constants, offsets = _build_safetensors(specs, storage_sizes)
    tensors = tuple(
        TensorEntry(
            name=spec.name,
            kind=spec.kind,
            dtype=spec.dtype,
            shape=spec.shape,
            strides=spec.strides,
            storage=spec.storage,
            offset=offsets[spec.storage] + spec.offset,
            requires_grad=spec.requires_grad,
        )
        for spec in specs
    )
    # Aliases of the same elements are scanned once.
    ranges = {
        (dtype, entry.offset, entry.shape, entry.strides): entry.name
        for spec, entry in zip(specs, tensors, strict=True)
        if spec.is_state and spec.size_bytes and (dtype := torch_name(spec) or spec.dtype) in FLOAT_DTYPES
    }
    return FileLayout(
        size_bytes=size_bytes,
        constants=tuple(constants),
        storage_offsets=tuple(offsets),
        crcs=crcs,
        floats=tuple(FloatRange(name, *place) for place, name in ranges.items()),
        storages=tuple(
            StorageEntry(offset=offset, size_bytes=size)
            for offset, size in zip(offsets, storage_sizes, strict=True)
        ),
        tensors=tensors,
    )


def _build_safetensors(
    specs: Sequence[TensorSpec], storage_sizes: Sequence[int]
) -> tuple[int, list[tuple[int, bytes]], list[int]]:
    """One entry per storage: the tensor that covers it, else its bytes.

    The format allows no gaps, so the widest elements come first: then every entry is aligned.
    """
    by_storage: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        by_storage.setdefault(spec.storage, []).append(spec)
    order = sorted(by_storage, key=lambda number: -max(spec.itemsize for spec in by_storage[number]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    relative = [0] * len(storage_sizes)
    position = 0
    for number in order:
        size = storage_sizes[number]
        cover = next((spec for spec in by_storage[number] if _covers(spec, size)), None)
        header[(cover or by_storage[number][0]).name] = {
            "dtype": SAFETENSORS_NAMES[torch_name(cover) or ""] if cover else "U8",
            "shape": list(cover.shape) if cover else [size],
            "data_offsets": [position, position + size],
        }
        relative[number] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    start = 8 + len(text)
    return (
        start + position,
        [(0, len(text).to_bytes(8, "little") + text)],
        [start + offset for offset in relative],
    )


def _covers(spec: TensorSpec, storage_size: int) -> bool:
    return spec.size_bytes == storage_size and spec.is_contiguous and torch_name(spec) in SAFETENSORS_NAMES
