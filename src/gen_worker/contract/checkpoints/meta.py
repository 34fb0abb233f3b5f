"""The records of `.meta.json`, the commit marker of a checkpoint: schema `trainer_checkpoint.v1`.

Fields may be added with a default; a field never changes its meaning. Needs neither torch nor numpy.

The document ends with `digest`, the SHA-256 of all bytes before that field; a document that does not match is refused.
Older releases wrote no digest: such a document is read only if it has no newer field, because a damaged field name must
not turn a new document into an old one.
"""

import re
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from gen_worker.contract.files.hashes import hash_bytes
from gen_worker.errors import CheckpointError

SCHEMA_VERSION = "trainer_checkpoint.v1"

Format = Literal["pt", "safetensors"]
_EMPTY = msgspec.Raw(b"{}")
_NULL = msgspec.Raw(b"null")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file that belongs to the checkpoint; `name` is relative to the folder of the meta."""

    name: str
    size_bytes: int
    hash: str  # "sha256:<hex>"


class StorageEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A range of bytes in the data file; tensors that share memory name the same storage."""

    offset: int
    size_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or array over a storage. Offsets and strides count bytes."""

    name: str
    kind: Literal["torch", "numpy"]
    dtype: str  # torch: "bfloat16"; numpy: "<f4"
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int  # of the first element, in the data file
    requires_grad: bool = False


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """What `keep_best` compares."""

    name: str
    value: float | None  # None: it was not finite
    mode: Literal["min", "max"]


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint without its data. The trees are decoded on use."""

    schema_version: str = SCHEMA_VERSION
    run_id: str
    nonce: str = ""  # of the submission, from a daemon
    attempt: int
    step: int
    epoch: int
    final: bool
    verified: bool = False
    reason: str = ""  # why it is not verified
    created_ms: int = 0
    format: Format = "pt"
    byteorder: Literal["little", "big"] = "little"
    state: msgspec.Raw = _EMPTY
    loop: msgspec.Raw = _EMPTY
    cursor: msgspec.Raw = _NULL
    rng: msgspec.Raw = _EMPTY
    identity: msgspec.Raw = _EMPTY
    author_payload: msgspec.Raw = _NULL
    author_dir: str | None = None
    metric: Metric | None = None
    files: tuple[FileEntry, ...] = ()  # the first one is the data file
    storages: tuple[StorageEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    digest: str = ""  # "sha256:<hex>" of the document; the last field. Empty: saved by an older release

    @property
    def data(self) -> FileEntry:
        return self.files[0]


class _Version(msgspec.Struct):
    schema_version: str = ""


class _OldMeta(CheckpointMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a release without digests."""


_version_decoder = msgspec.json.Decoder(_Version)
_meta_decoder = msgspec.json.Decoder(CheckpointMeta)
_old_meta_decoder = msgspec.json.Decoder(_OldMeta)
_DIGEST = b',"digest":"'
_END = b'"}\n'
_DIGEST_AND_END = re.compile(rb'sha256:[0-9a-f]{64}"}\n')


def has_digest(content: bytes) -> bool:
    """Whether the document ends with a digest; it may not match."""
    _, mark, end = content[-256:].rpartition(_DIGEST)
    return bool(mark) and _DIGEST_AND_END.fullmatch(end) is not None


def parse_meta(content: bytes, source: str) -> CheckpointMeta:
    """Strict; CheckpointError says what is wrong."""
    is_digested = has_digest(content)
    if is_digested:
        _compare_digest(content, source)
    try:
        version = _version_decoder.decode(content).schema_version
        if not version:
            raise CheckpointError(
                f"{source} is not a checkpoint: expected its meta, or a document with a `state`"
            )
        if version != SCHEMA_VERSION:
            raise CheckpointError(
                f"{source} has schema_version {version!r}, but this release reads {SCHEMA_VERSION!r}. "
                "Resume with the release that wrote it"
            )
        meta = (_meta_decoder if is_digested else _old_meta_decoder).decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{source} cannot be read as a checkpoint's meta: {error}") from error
    fault = _find_fault(meta)
    if not fault and meta.digest and not is_digested:
        fault = "its digest is not the last field"
    if fault:
        raise CheckpointError(f"{source} is invalid: {fault}")
    return meta


def _compare_digest(content: bytes, source: str) -> None:
    covered, _, end = content.rpartition(_DIGEST)
    found, said = _digest_of(covered), end.removesuffix(_END)
    if found != said:
        raise CheckpointError(
            f"{source} is damaged or was edited: its bytes have the digest {found.decode()}, it says {said.decode()}"
        )


def _digest_of(covered: bytes) -> bytes:
    return hash_bytes(covered).encode()


def encode_meta(meta: CheckpointMeta, *, with_digest: bool = True) -> bytes:
    """`with_digest=False`: for the copy of a meta that had none."""
    text = msgspec.json.encode(msgspec.structs.replace(meta, digest=""))
    empty = _DIGEST + _END[:-1]
    assert text.endswith(empty), "the digest is the last field"
    covered = text.removesuffix(empty)
    return covered + (_DIGEST + _digest_of(covered) + _END if with_digest else b"}\n")


def _find_fault(meta: CheckpointMeta) -> str:
    if not meta.files:
        return "it names no data file"
    for file in meta.files:
        path = PurePosixPath(file.name)
        if (
            path.is_absolute()
            or ".." in path.parts
            or "\\" in file.name
            or "\0" in file.name
            or not path.parts
        ):
            return f"file name {file.name!r} leaves the checkpoint's folder"
        if file.size_bytes < 0 or not file.hash.startswith("sha256:"):
            return f"file {file.name!r} has size {file.size_bytes} and hash {file.hash!r}"
    if len(PurePosixPath(meta.data.name).parts) != 1:
        return f"data file {meta.data.name!r} is in another folder"
    if meta.author_dir is not None and len(PurePosixPath(meta.author_dir).parts) != 1:
        return f"author_dir {meta.author_dir!r} is in another folder"
    if meta.step < 0 or meta.epoch < 0:
        return f"step {meta.step}, epoch {meta.epoch}"
    for number, storage in enumerate(meta.storages):
        if (
            min(storage.offset, storage.size_bytes) < 0
            or storage.offset + storage.size_bytes > meta.data.size_bytes
        ):
            return f"storage {number} lies outside the data file"
    for tensor in meta.tensors:
        if not 0 <= tensor.storage < len(meta.storages) or len(tensor.shape) != len(tensor.strides):
            return f"tensor {tensor.name!r} names storage {tensor.storage}, shape {tensor.shape}, strides {tensor.strides}"
        if min(tensor.shape, default=0) < 0:
            return f"tensor {tensor.name!r} has shape {tensor.shape}"
    return ""
