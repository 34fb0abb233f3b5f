"""One connection of a launcher: lines in and out, without blocking."""

import socket
from collections.abc import Iterator

import msgspec

from gen_worker.launcher.messages import MAX_LINE_BYTES, AnyReply, encode

RECEIVE_BYTES = 1 << 16
MAX_UNSENT_BYTES = 4 << 20


class Channel:
    """`is_lost`: the other end has closed, or does not read; the owner then closes it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_lost = False
        self._received = b""
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> Iterator[bytes]:
        """The complete lines that were received."""
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_lost = True
            return
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > MAX_LINE_BYTES:
            self.is_lost = True
        yield from lines

    def send(self, message: AnyReply | msgspec.Struct) -> None:
        self._unsent += encode(message) + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent and not self.is_lost:
                sent = self.socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            self.is_lost = len(self._unsent) > MAX_UNSENT_BYTES
        except OSError:
            self.is_lost = True
