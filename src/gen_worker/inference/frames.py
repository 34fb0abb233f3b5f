"""Frames on a stream socket: two lengths, a header in msgpack, a payload of raw bytes. Never pickle."""

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from gen_worker.inference.messages import FromWorker, Message, ToWorker

_LENGTHS = struct.Struct("<IQ")  # of the header and of the payload
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 4 << 30
MAX_PIECES = 512  # of one call; systems take 1024

_encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

M = TypeVar("M")
Buffer = bytes | bytearray | memoryview


class FrameError(ValueError):
    """The other side is not one of ours, or died while it wrote."""


def encode_frame(message: Message, payload: Sequence[Buffer] = ()) -> list[Buffer]:
    """To be written one after the other."""
    header = _encoder.encode(message)
    size = sum(
        len(memoryview(each).cast("B")) if isinstance(each, memoryview) else len(each) for each in payload
    )
    return [_LENGTHS.pack(len(header), size) + header, *payload]


class FrameReader(Generic[M]):
    """Bytes as they come -> frames. The payload is a view of memory that is not used again."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: Buffer) -> Iterator[tuple[M, memoryview]]:
        if not self._buffer and isinstance(data, bytes) and len(data) >= _LENGTHS.size:
            header_bytes, payload_bytes = _read_lengths(data)
            start = _LENGTHS.size + header_bytes
            if len(data) == start + payload_bytes:  # one whole frame, as most: nothing is copied
                frame = memoryview(data)
                yield _decode(self._decoder, frame[_LENGTHS.size : start]), frame[start:]
                return
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            header_bytes, payload_bytes = _read_lengths(self._buffer)
            end = _LENGTHS.size + header_bytes + payload_bytes
            if len(self._buffer) < end:
                return
            frame = memoryview(bytes(self._buffer[:end]))
            del self._buffer[:end]
            start = _LENGTHS.size + header_bytes
            yield _decode(self._decoder, frame[_LENGTHS.size : start]), frame[start:]


def receive_frame(link: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> tuple[M, memoryview] | None:
    """The next frame; None at the end of the stream. Blocks."""
    lengths = _receive(link, _LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, payload_bytes = _read_lengths(lengths)
    frame = _receive(link, header_bytes + payload_bytes)
    if frame is None:
        raise FrameError("the connection ended in the middle of a frame")
    return _decode(decoder, frame[:header_bytes]), frame[header_bytes:]


def send_frame(link: socket.socket, message: Message, payload: Sequence[Buffer] = ()) -> None:
    """Blocks until it is in the socket's buffer."""
    pieces = encode_frame(message, payload)
    # With one call: the other side wakes up once, and finds all of it.
    sent = link.sendmsg(pieces[:MAX_PIECES])
    for piece in pieces:
        size = memoryview(piece).nbytes
        if sent < size:
            link.sendall(memoryview(piece).cast("B")[sent:])
        sent = max(sent - size, 0)


def _receive(link: socket.socket, size: int) -> memoryview | None:
    """Exactly so many bytes; None where the stream ends before the first one."""
    buffer = memoryview(bytearray(size))
    received = 0
    while received < size:
        count = link.recv_into(buffer[received:], 0, socket.MSG_WAITALL)  # woken once, also for a large one
        if count == 0:
            if received == 0:
                return None
            raise FrameError("the connection ended in the middle of a frame")
        received += count
    return buffer


def _read_lengths(buffer: Any) -> tuple[int, int]:
    header_bytes, payload_bytes = _LENGTHS.unpack_from(buffer)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a frame says that it has {header_bytes} and {payload_bytes} bytes")
    return header_bytes, payload_bytes


def _decode(decoder: msgspec.msgpack.Decoder[M], header: memoryview) -> M:
    try:
        return decoder.decode(header)
    except msgspec.MsgspecError as fault:
        raise FrameError(f"a frame cannot be read: {fault}") from fault
