"""HTTP/1.1 on one connection: requests read within limits, answered in their order.

Requests that were sent ahead are worked on together, so that they share batches. Answers leave in the order of the
requests. While much is unanswered or unread, nothing more is read.
"""

import asyncio
import time
from collections import deque
from typing import Any, cast

import httptools

from gen_worker.inference.frames import Buffer
from gen_worker.inference.front.http.exchange import Exchange
from gen_worker.inference.front.http.heads import HEAD_END, MAX_KNOWN_BYTES, Head
from gen_worker.inference.front.http.reception import Reception
from gen_worker.inference.front.refusals import Refusal

MAX_HEAD_BYTES = 32 << 10
MIN_VIEW_BYTES = 16 << 10  # of a body: a smaller one is copied sooner
MAX_AHEAD = 64  # requests of one connection that are not answered
MAX_ID = 128

# What decides something; others are not kept.
_KEPT = frozenset(
    {
        b"accept",
        b"authorization",
        b"content-length",
        b"content-type",
        b"expect",
        b"inference-header-content-length",
        b"x-deadline-ms",
        b"x-request-id",
    }
)
_ID_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:")


class Connection(asyncio.Protocol):
    """Reads requests and hands them to their routes. Nothing here waits: all of it is called by the loop."""

    def __init__(self, reception: Reception) -> None:
        self.reception = reception
        self._parser: Any = httptools.HttpRequestParser(self)
        self._peer: asyncio.Transport | None = None
        self._exchanges: deque[Exchange] = deque()  # without their whole answer, in order
        self._is_reading = False  # a request has begun, and is not complete
        self._read_bytes = 0  # of that request
        self._path = b""
        self._headers: dict[bytes, bytes] = {}
        self._head: Head | None = None  # once all of it was read
        self._num_heads = 0  # of this connection, so far
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._since = time.monotonic()  # of the wait for the rest of a request
        self._unread_since: float | None = None
        self._is_deaf = False  # nothing more is read: an answer that closes is on its way
        self._is_paused = False

    @property
    def is_lost(self) -> bool:
        return self._peer is None

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = cast(asyncio.Transport, transport)
        self.reception.connections[self] = None
        self.reception.idle[self] = None
        self.reception.make_room()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (asyncio's name)
        self._peer = None
        self._is_deaf = True
        self.reception.forget(self)
        self._drop_body()
        self._leave_all()
        self._is_reading = False

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._is_reading or self._read_bytes:
            self._parse(data)
            return
        end = data.find(HEAD_END, 0, MAX_KNOWN_BYTES) + len(HEAD_END)
        head = self.reception.known.find(data[:end])
        if head is None:
            self._parse(data, end)
        elif len(data) == end + head.body_bytes and self._has_room(head.body_bytes):
            self._take(head, data[end:] if head.body_bytes < MIN_VIEW_BYTES else memoryview(data)[end:])
        else:
            self._parse(data)

    def eof_received(self) -> None:
        """The connection is closed. A client that leaves looks like one that only sends no more: it is not waited for."""

    def pause_writing(self) -> None:
        self._unread_since = time.monotonic()
        self._pause()

    def resume_writing(self) -> None:
        self._unread_since = None
        self._resume()
        self._resume_stream()

    # How a request is read.

    def _take(self, head: Head, body: Buffer) -> None:
        """A whole request whose head is known. The parser is between two requests, and does not see it."""
        self.reception.idle.pop(self, None)
        exchange = Exchange(self, head)
        exchange.body = body
        self._handle(exchange, self.reception.new_id())
        if len(self._exchanges) >= MAX_AHEAD:
            self._pause()

    def _parse(self, data: bytes, head_bytes: int = 0) -> None:
        """`head_bytes`: so many at its beginning look like a head that is not known."""
        self._read_bytes += len(data)
        try:
            if len(HEAD_END) < head_bytes < len(data):
                self._learn(data[:head_bytes])
                data = data[head_bytes:]
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            assert self._is_deaf, "the head was refused"
        except httptools.HttpParserCallbackError as fault:
            raise fault.__context__ or fault from None
        except httptools.HttpParserError as fault:
            self._refuse("input", f"the request is not HTTP/1.1: {fault}")
        else:
            # What is no body: the head, the frames of chunks, and what follows them.
            if self._read_bytes - 2 * self._body_bytes > MAX_HEAD_BYTES:
                self._refuse("too_large", f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
            if len(self._exchanges) >= MAX_AHEAD:
                self._pause()

    def _learn(self, content: bytes) -> None:
        """Parse it. It is known from now on if the parser takes it for one whole head, and now waits for the body."""
        before = self._num_heads
        self._parser.feed_data(content)
        head = self._head
        if (
            self._num_heads == before + 1
            and head is not None
            and head.body_bytes
            and not self._body_bytes
            and not self._is_deaf
        ):
            self.reception.known.keep(content, head)

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._is_deaf:
            return
        self._is_reading = True
        self._path, self._headers, self._head = b"", {}, None
        self._since = time.monotonic()
        self.reception.idle.pop(self, None)

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT and self._is_reading:
            if name in self._headers:
                self._refuse("input", f"the header {name.decode()} is given twice")
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        if not self._is_reading:
            return
        reception, headers, parser = self.reception, self._headers, self._parser
        path = self._path.partition(b"?")[0]
        route = reception.routes.get(path)
        self._head = head = Head(
            method=parser.get_method(),
            path=path,
            headers=headers,
            content_type=headers.get(b"content-type", b"").lower(),
            body_bytes=int(headers.get(b"content-length", b"0")),
            route=route,
            keeps_alive=parser.should_keep_alive(),
            is_chunked=parser.get_http_version() != "1.0",
        )
        self._num_heads += 1
        if not (route is not None and route.is_open) and not reception.admits(headers.get(b"authorization")):
            self._refuse(
                "unauthorized", "the request needs `Authorization: Bearer` with the secret of the server"
            )
            return
        if parser.should_upgrade():
            self._refuse("input", "the connection cannot be upgraded")
            return
        if head.body_bytes > reception.max_body_bytes:
            self._refuse("too_large", f"a body has at most {reception.max_body_bytes} bytes")
        elif b"expect" in headers and self._peer is not None:
            self._peer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._is_deaf:
            return
        self._body_bytes += len(body)
        reception = self.reception
        reception.unfinished_bytes += len(body)
        if self._body_bytes > reception.max_body_bytes:
            self._refuse("too_large", f"a body has at most {reception.max_body_bytes} bytes")
        elif reception.unfinished_bytes > reception.max_unfinished_bytes:
            self._refuse("unavailable", "too many bodies are being received", retry_after_s=1)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if not self._is_reading or self._is_deaf:
            return
        assert self._head is not None, "a message has a head"
        exchange = Exchange(self, self._head)
        pieces = self._body
        if len(pieces) == 1:
            exchange.body = pieces[0]
        elif pieces:
            exchange.body = b"".join(pieces)
        if pieces:
            self._drop_body()
        self._is_reading = False
        self._head = None
        self._read_bytes = 0
        self._handle(exchange, self._choose_id(exchange.head))

    def _handle(self, exchange: Exchange, request_id: bytes) -> None:
        """A request is complete: give it to its route."""
        head = exchange.head
        exchange.begun_at = time.perf_counter()
        exchange.request_id = request_id
        self._exchanges.append(exchange)
        if not head.keeps_alive:
            exchange.keeps_alive = False
            self._is_deaf = True
        route = head.route
        if route is None:
            exchange.refuse(Refusal("not_found", "there is nothing at this path"))
        elif route.method != head.method:
            exchange.refuse(Refusal("method", f"this path takes {route.method.decode()}"))
        else:
            try:
                route.handle(exchange)
            except Refusal as refusal:
                exchange.refuse(refusal)
            except Exception:
                exchange.refuse(self.reception.failed(exchange, "the request"))

    # What exchanges call.

    def send(self, exchange: Exchange, data: bytes, *, is_last: bool) -> bool:
        """A part of an answer, or all of it: in the order of the requests. Whether more should follow now."""
        exchanges = self._exchanges
        transport = self._peer
        if transport is None:
            return False
        if not exchanges or exchange is not exchanges[0]:
            exchange.output = [*(exchange.output or ()), data]
            return False
        transport.write(data)
        if exchange.is_open_end:
            return self._unread_since is None
        exchanges.popleft()
        while exchanges and not is_last and (following := exchanges[0]).output is not None:
            transport.write(b"".join(following.output))
            following.output = None
            if following.is_open_end:
                self._resume_stream()
                break
            is_last = not following.keeps_alive
            exchanges.popleft()
        if is_last:
            self._is_deaf = True
            self._leave_all()
            transport.close()
        elif not exchanges and not self._is_reading:
            self.reception.idle[self] = None
        if self._is_paused:
            self._resume()
        return False

    def close_if_slow(self, now: float) -> None:
        if self._unread_since is not None and now - self._unread_since > self.reception.unread_s:
            self.abort()
        elif self._is_reading or (self._read_bytes and not self._exchanges):
            limit_s = self.reception.head_s if self._head is None else self.reception.body_s
            if now - self._since > limit_s:
                self.abort()

    def close_if_idle(self) -> None:
        """When a front drains: no answer is awaited here."""
        if self._peer is not None and not self._exchanges and not self._is_reading:
            self._is_deaf = True
            self._peer.close()

    def end(self, refusal: Refusal) -> None:
        """When a front ends: who still waits gets the refusal."""
        self._is_deaf = True
        for exchange in [*self._exchanges]:
            if exchange.left is not None:
                exchange.left()
            if exchange.is_open_end:
                exchange.finish()
            elif not exchange.is_answered:
                exchange.refuse(refusal)
        if self._peer is not None:
            self._peer.close()

    def abort(self) -> None:
        self._is_deaf = True
        self.reception.forget(self)
        if self._peer is not None:
            self._peer.abort()

    # Smaller things.

    def _has_room(self, num_bytes: int) -> bool:
        """For the body of one more request: all that are being received are bounded together."""
        return self.reception.unfinished_bytes + num_bytes <= self.reception.max_unfinished_bytes

    def _choose_id(self, head: Head) -> bytes:
        given = head.headers.get(b"x-request-id")
        if given and len(given) <= MAX_ID and _ID_BYTES.issuperset(given):
            return given
        return self.reception.new_id()

    def _refuse(self, kind: str, message: str, *, retry_after_s: int | None = None) -> None:
        """Answer what is being read, and close: what follows it cannot be trusted."""
        if self._is_deaf:
            return
        self._is_deaf = True
        headers = self._headers if self._is_reading else {}
        exchange = Exchange(self, self._head or Head(headers=headers))
        self._is_reading = False
        self._head = None
        self._drop_body()
        exchange.keeps_alive = False
        exchange.begun_at = time.perf_counter()
        exchange.request_id = self._choose_id(exchange.head)
        self._exchanges.append(exchange)
        exchange.refuse(Refusal(kind, message, retry_after_s=retry_after_s))

    def _leave_all(self) -> None:
        """The client of these answers has left."""
        left = [*self._exchanges]
        self._exchanges.clear()
        for exchange in left:
            if exchange.left is not None:
                exchange.left()

    def _resume_stream(self) -> None:
        if self._exchanges and self._exchanges[0].resumed is not None:
            self._exchanges[0].resumed()

    def _drop_body(self) -> None:
        self.reception.unfinished_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

    def _pause(self) -> None:
        if not self._is_paused and self._peer is not None and not self._is_deaf:
            self._is_paused = True
            self._peer.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and self._unread_since is None and len(self._exchanges) < MAX_AHEAD:
            self._is_paused = False
            if self._peer is not None and not self._peer.is_closing():
                self._peer.resume_reading()
