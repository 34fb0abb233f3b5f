"""Messages between trainer and checkpoint writer: length-prefixed JSON over a socket pair."""

import socket

import msgspec

from gen_worker.contract.checkpoints.meta import CheckpointMeta, FileEntry
from gen_worker.trainer.checkpoints.files.archive import CrcRecord
from gen_worker.trainer.checkpoints.files.format import FloatRange

_PREFIX = 8


class WriterConfig(msgspec.Struct, frozen=True, kw_only=True):
    checkpoints_dir: str
    socket_fd: int
    staging_fd: int
    token: str  # of this attempt: temporary names with another one are leftovers
    writer_token: str
    keep_last: int
    keep_best: int


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make the staged image durable. The writer owns the image until it has answered."""

    stem: str
    suffix: str
    size_bytes: int
    crcs: tuple[CrcRecord, ...]
    floats: tuple[FloatRange, ...]
    meta: CheckpointMeta
    author_files: str | None = None


class Durable(msgspec.Struct, frozen=True, kw_only=True, tag="durable"):
    """The checkpoint is committed and survives a power cut. It has not been read back yet."""

    at_s: float  # on the system-wide monotonic clock


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Read back, matched, retention applied."""

    verified: bool
    reason: str
    files: tuple[FileEntry, ...]
    removed: tuple[str, ...]
    warnings: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    message: str
    cause: str = ""  # see `failure.find_cause`


Report = Durable | Done | Failed


def pack(message: msgspec.Struct) -> bytes:
    content = msgspec.json.encode(message)
    return len(content).to_bytes(_PREFIX, "little") + content


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Blocks until it is sent."""
    connection.sendall(pack(message))


class Inbox:
    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> bytes | None:
        if len(self._bytes) < _PREFIX:
            return None
        end = _PREFIX + int.from_bytes(self._bytes[:_PREFIX], "little")
        if len(self._bytes) < end:
            return None
        content = bytes(self._bytes[_PREFIX:end])
        del self._bytes[:end]
        return content
