"""Minimum throughput of a connection. httpx limits only each wait, so a server could send one byte at a time forever.

- The head of an answer must be complete within `stall_timeout_s`.
- A body, in both directions, needs `MIN_BYTES_PER_S` over `stall_timeout_s` of waiting for the network.
"""

import ssl
import time
from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import httpcore

if TYPE_CHECKING:
    import httpx

MIN_BYTES_PER_S = 1024
PIECE_BYTES = 64 << 10


def pace(client: "httpx.Client", stall_timeout_s: float) -> None:
    """Apply the limits to all connections of `client`. Call it before its first request."""
    import httpx

    client.event_hooks["response"].append(_note_head)
    # httpx has no option for this. The tests of slow servers fail if these private names change.
    for transport in (client._transport, *client._mounts.values()):
        if isinstance(transport, httpx.HTTPTransport):
            pool = transport._pool
            pool._network_backend = _PacedBackend(pool._network_backend, stall_timeout_s)


def _note_head(response: "httpx.Response") -> None:
    stream = response.extensions.get("network_stream")
    if isinstance(stream, _PacedStream):
        stream.begin_body()


class _PacedBackend(httpcore.NetworkBackend):
    def __init__(self, inner: httpcore.NetworkBackend, stall_timeout_s: float) -> None:
        self._inner = inner
        self._stall_timeout_s = stall_timeout_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _PacedStream(stream, self._stall_timeout_s)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_unix_socket(path, timeout, socket_options)
        return _PacedStream(stream, self._stall_timeout_s)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _Phase(Enum):
    REQUEST = auto()
    HEAD = auto()
    BODY = auto()


class _PacedStream(httpcore.NetworkStream):
    """Counts the time of waiting for the network and the bytes received. Used by one thread at a time."""

    def __init__(self, inner: httpcore.NetworkStream, stall_timeout_s: float) -> None:
        self._inner = inner
        self._stall_timeout_s = stall_timeout_s
        self._enter(_Phase.REQUEST)

    def begin_body(self) -> None:
        self._enter(_Phase.BODY)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._phase is _Phase.REQUEST:
            self._enter(_Phase.HEAD)
        if self._phase is _Phase.HEAD:
            timeout = self._entered_at + self._stall_timeout_s - time.monotonic()
            if timeout <= 0:
                raise httpcore.ReadTimeout(f"no answer within {self._stall_timeout_s:g} s")
        began_at = time.monotonic()
        data = self._inner.read(max_bytes, timeout)
        self._waited_s += time.monotonic() - began_at
        if data and self._phase is _Phase.BODY:
            self._count(len(data), httpcore.ReadTimeout)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._phase is not _Phase.REQUEST:
            self._enter(_Phase.REQUEST)
        for start in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[start : start + PIECE_BYTES]
            began_at = time.monotonic()
            self._inner.write(piece, timeout)
            self._waited_s += time.monotonic() - began_at
            self._count(len(piece), httpcore.WriteTimeout)

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        stream = self._inner.start_tls(ssl_context, server_hostname, timeout)
        return _PacedStream(stream, self._stall_timeout_s)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._entered_at = time.monotonic()
        self._waited_s, self._num_bytes = 0.0, 0

    def _count(self, num_bytes: int, error: type[Exception]) -> None:
        self._num_bytes += num_bytes
        if self._waited_s >= self._stall_timeout_s:
            if self._num_bytes < MIN_BYTES_PER_S * self._stall_timeout_s:
                raise error(f"only {self._num_bytes} bytes in {self._waited_s:.1f} s")
            self._waited_s, self._num_bytes = 0.0, 0
