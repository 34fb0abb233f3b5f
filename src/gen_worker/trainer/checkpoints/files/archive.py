"""The `.pt` file: a zip archive that `torch.load(weights_only=True)` reads, made without torch or pickle.

It holds one flat `dict[str, Tensor]`. Records are uncompressed and aligned to 64 bytes; their CRC32s come after the
data, as in torch's own files, so that the image can be hashed in one pass.
"""

import struct
import sys
import zlib
from collections.abc import Sequence

import msgspec

from gen_worker.trainer.checkpoints.files.dtypes import STORAGE_CLASSES, UNTYPED, torch_name
from gen_worker.trainer.checkpoints.files.tensors import TensorSpec

ALIGNMENT = 64
ROOT = "archive"
ZIP64_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on need the 64-bit fields

_FLAGS = 0x0808  # CRC after the data; names in UTF-8
_DATE = 0x21  # 1 January 1980: equal states make equal files
_VERSION = 45


class CrcRecord(msgspec.Struct, frozen=True, array_like=True):
    """Bytes whose CRC32 is written to two slots: after the data and in the directory."""

    offset: int
    size_bytes: int
    descriptor_slot: int
    directory_slot: int


def build_archive(
    specs: Sequence[TensorSpec], storage_sizes: Sequence[int]
) -> tuple[int, list[tuple[int, bytes]], list[int], tuple[CrcRecord, ...]]:
    """(file size, constant bytes and their offsets, storage offsets, checksums to fill in)."""
    archive = _Archive()
    archive.add("data.pkl", _pickle_tensors(specs, storage_sizes))
    archive.add("byteorder", sys.byteorder.encode())
    archive.add("version", b"3\n")
    offsets = [archive.reserve(f"data/{number}", size) for number, size in enumerate(storage_sizes)]
    size_bytes, crcs = archive.finish()
    return size_bytes, archive.constants, offsets, crcs


class _Archive:
    def __init__(self) -> None:
        self.constants: list[tuple[int, bytes]] = []
        self._position = 0
        # (name, size, header offset, data offset, descriptor slot, CRC32 or None while unknown)
        self._records: list[tuple[bytes, int, int, int, int, int | None]] = []

    def add(self, name: str, content: bytes) -> None:
        offset = self._begin(name, len(content), zlib.crc32(content))
        self.constants.append((offset, content))

    def reserve(self, name: str, size: int) -> int:
        return self._begin(name, size, None)

    def _begin(self, name: str, size: int, crc: int | None) -> int:
        encoded = f"{ROOT}/{name}".encode()
        is_large = size >= ZIP64_LIMIT
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_large else b""
        header_offset = self._position
        unpadded = header_offset + 30 + len(encoded) + len(extra)
        padding = -(unpadded + 4) % ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        short = ZIP64_LIMIT if is_large else 0
        header = struct.pack(
            "<4s5H3I2H", b"PK\3\4", _VERSION, _FLAGS, 0, 0, _DATE, 0, short, short, len(encoded), len(extra)
        )
        self.constants.append((header_offset, header + encoded + extra))
        data_offset = unpadded + 4 + padding
        descriptor = data_offset + size
        sizes = struct.pack("<QQ" if is_large else "<II", size, size)
        self.constants.append((descriptor, b"PK\7\10" + struct.pack("<I", crc or 0) + sizes))
        self._records.append((encoded, size, header_offset, data_offset, descriptor + 4, crc))
        self._position = descriptor + 8 + len(sizes)
        return data_offset

    def finish(self) -> tuple[int, tuple[CrcRecord, ...]]:
        directory = bytearray()
        directory_offset = self._position
        crcs = []
        for name, size, header_offset, data_offset, descriptor_slot, crc in self._records:
            if crc is None:
                slot = directory_offset + len(directory) + 16
                crcs.append(CrcRecord(data_offset, size, descriptor_slot, slot))
            directory += _directory_entry(name, size, header_offset, crc or 0)
        self.constants.append(
            (directory_offset, bytes(directory) + self._end(directory_offset, len(directory)))
        )
        offset, content = self.constants[-1]
        return offset + len(content), tuple(crcs)

    def _end(self, directory_offset: int, directory_size: int) -> bytes:
        count = len(self._records)
        end = b""
        if count >= 0xFFFF or directory_offset >= ZIP64_LIMIT or directory_size >= ZIP64_LIMIT:
            end_offset = directory_offset + directory_size
            numbers = (count, count, directory_size, directory_offset)
            end += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, *numbers)
            end += struct.pack("<4sIQI", b"PK\6\7", 0, end_offset, 1)
            count, directory_size, directory_offset = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
        return end + struct.pack(
            "<4s4H2IH", b"PK\5\6", 0, 0, count, count, directory_size, directory_offset, 0
        )


def _directory_entry(name: bytes, size: int, header_offset: int, crc: int) -> bytes:
    large = [number for number in (size, size, header_offset) if number >= ZIP64_LIMIT]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size_field = size if size < ZIP64_LIMIT else 0xFFFFFFFF
    offset_field = header_offset if header_offset < ZIP64_LIMIT else 0xFFFFFFFF
    head = (
        b"PK\1\2",
        _VERSION,
        _VERSION,
        _FLAGS,
        0,
        0,
        _DATE,
        crc,
        size_field,
        size_field,
        len(name),
        len(extra),
    )
    return struct.pack("<4s6H3I2H", *head) + struct.pack("<3H2I", 0, 0, 0, 0, offset_field) + name + extra


_TYPED_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
_UNTYPED_TENSOR = b"ctorch._utils\n_rebuild_tensor_v3\n"
_HOOKS = b"ccollections\nOrderedDict\n"


def _pickle_tensors(specs: Sequence[TensorSpec], storage_sizes: Sequence[int]) -> bytes:
    """The pickle of a flat dict of tensors, as torch.save would write it."""
    views: dict[int, set[str | None]] = {}
    for spec in specs:
        views.setdefault(spec.storage, set()).add(torch_name(spec) if _is_presentable(spec) else None)
    memo: dict[bytes, int] = {}

    def recall(program: bytes) -> bytes:
        if program in memo:
            return b"h" + bytes((memo[program],))
        memo[program] = len(memo)
        return program + b"q" + bytes((memo[program],))

    out = bytearray(b"\x80\x02}(")
    for spec in specs:
        size = storage_sizes[spec.storage]
        dtype, offset, shape, strides = torch_name(spec) or "", spec.offset, spec.shape, spec.strides
        if not _is_presentable(spec):  # torch has no such element type or stride: its storage, as bytes
            dtype, offset, shape, strides = "uint8", 0, (size,), (1,)
        itemsize = spec.itemsize if _is_presentable(spec) else 1
        # A typed storage has one element type; where views differ, the storage is untyped.
        is_typed = dtype in STORAGE_CLASSES and len(views[spec.storage]) == 1
        storage_class = (
            f"ctorch\n{STORAGE_CLASSES[dtype]}\n" if is_typed else "ctorch.storage\nUntypedStorage\n"
        )
        out += _text(spec.name)
        out += recall(_TYPED_TENSOR if is_typed else _UNTYPED_TENSOR) + b"("
        out += (
            b"("
            + recall(_text("storage"))
            + recall(storage_class.encode())
            + _text(str(spec.storage))
            + recall(_text("cpu"))
        )
        out += _integer(size // itemsize if is_typed else size) + b"tQ"
        out += _integer(offset // itemsize)
        out += b"(" + b"".join(map(_integer, shape)) + b"t"
        out += b"(" + b"".join(_integer(stride // itemsize) for stride in strides) + b"t"
        out += b"\x89" + recall(_HOOKS) + b")R"
        if not is_typed:
            out += recall(f"ctorch\n{dtype}\n".encode())
        out += b"tR"
    return bytes(out + b"u.")


def _is_presentable(spec: TensorSpec) -> bool:
    dtype = torch_name(spec)
    if dtype not in STORAGE_CLASSES and dtype not in UNTYPED:
        return False
    return spec.offset % spec.itemsize == 0 and all(
        stride >= 0 and stride % spec.itemsize == 0 for stride in spec.strides
    )


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes((len(encoded),)) + encoded
