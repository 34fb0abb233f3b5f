"""One request and its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.http.heads import Head
from gen_worker.inference.front.refusals import Refusal

if TYPE_CHECKING:
    from gen_worker.inference.front.http.connection import Connection

JSON = b"application/json"
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}
_STATUS_LINES = {
    status: b"HTTP/1.1 %d %s\r\nContent-Type: " % (status, reason) for status, reason in _REASONS.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: bytes
    handle: "Callable[[Exchange], None]"
    is_open: bool = False  # also without the bearer


class Exchange:
    """One request and its answer. Answered exactly once."""

    body: Buffer = b""
    request_id = b""
    begun_at = 0.0  # time.perf_counter() when it was complete
    keeps_alive = True
    is_answered = False
    is_open_end = False  # its answer is a stream that goes on
    output: list[Buffer] | None = None  # of an answer that waits for others before it
    left: Callable[[], None] | None = None  # called if the client leaves before its answer is complete
    resumed: Callable[[], None] | None = None  # called when a stream may go on

    def __init__(self, connection: "Connection", head: Head) -> None:
        self.connection = connection
        self.head = head

    @property
    def is_gone(self) -> bool:
        """Its client has left: no answer is needed."""
        return self.connection.is_lost

    def answer(self, status: int, body: Buffer, headers: bytes = b"", content_type: bytes = JSON) -> None:
        """`headers` are whole lines."""
        self.is_answered = True
        self.left = None
        connection = self.connection
        reception = connection.reception
        reception.answered(self, status)
        self.keeps_alive = self.keeps_alive and not reception.is_closing
        is_last = not self.keeps_alive
        connection.send(
            self,
            b"".join(
                (
                    _STATUS_LINES[status],
                    content_type,
                    b"\r\nContent-Length: %d\r\n" % len(body),
                    headers,
                    b"X-Request-Id: ",
                    self.request_id,
                    b"\r\nConnection: close\r\n\r\n" if is_last else b"\r\n\r\n",
                    body,
                )
            ),
            is_last=is_last,
        )

    def refuse(self, refusal: Refusal) -> None:
        headers = b""
        if refusal.retry_after_s is not None:
            headers += b"Retry-After: %d\r\n" % refusal.retry_after_s
        if refusal.kind == "unauthorized":
            headers += b"WWW-Authenticate: Bearer\r\n"
        if refusal.kind == "method" and self.head.route is not None:
            headers += b"Allow: " + self.head.route.method + b"\r\n"
        document = refusal.document(self.request_id.decode("ascii"))
        self.answer(refusal.status, msgspec.json.encode(document), headers)

    # A stream: `begin`, any number of `add`, `finish`.

    def begin(self, content_type: bytes, headers: bytes, resumed: Callable[[], None]) -> None:
        """`resumed` is called when further data may be added after `add` said otherwise."""
        self.is_answered = self.is_open_end = True
        self.resumed = resumed
        connection = self.connection
        connection.reception.answered(self, 200)
        if not self.head.is_chunked:
            self.keeps_alive = False  # the end of the connection is the end of the answer
        if not self.keeps_alive or connection.reception.is_closing:
            headers += b"Connection: close\r\n"
        head = (
            _STATUS_LINES[200],
            content_type,
            b"\r\nCache-Control: no-store\r\n",
            headers,
            b"Transfer-Encoding: chunked\r\n" if self.head.is_chunked else b"",
            b"X-Request-Id: ",
            self.request_id,
            b"\r\n\r\n",
        )
        connection.send(self, b"".join(head), is_last=False)

    def add(self, data: bytes) -> bool:
        """Whether the client reads as fast as it gets; else wait until `resumed`."""
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if self.head.is_chunked else data
        return self.connection.send(self, chunk, is_last=False)

    def finish(self) -> None:
        self.is_open_end = False
        self.left = self.resumed = None
        self.keeps_alive = self.keeps_alive and not self.connection.reception.is_closing
        is_last = not self.keeps_alive
        self.connection.send(self, b"0\r\n\r\n" if self.head.is_chunked else b"", is_last=is_last)
