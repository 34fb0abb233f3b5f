"""Servers that answer wrongly: raw bytes to whoever asks, and an object store between whose answers errors are put."""

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

DEADLINE_S = 60.0

Answer = bytes | Iterable[bytes]


class RudeServer:
    """Answers each request (of a connection of its own) with the bytes that `answer(number, head)` gives. A context.

    `is_over` is set when the test ends: an answer that goes on for ever looks at it.
    """

    def __init__(
        self,
        answer: Callable[[int, bytes], Answer],
        *,
        tls: ssl.SSLContext | None = None,
        reads_body: bool = True,
    ) -> None:
        self._answer = answer
        self._tls = tls
        self._reads_body = reads_body
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.heads: list[bytes] = []  # of the requests, as they came
        self.num_connections = 0
        self.is_over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), plain:
            connection = self._tls.wrap_socket(plain, server_side=True) if self._tls else plain
            with connection:
                head = self._read_request(connection)
                if head is None:
                    return
                self.heads.append(head)
                answer = self._answer(len(self.heads), head)
                for part in [answer] if isinstance(answer, bytes) else answer:
                    connection.sendall(part)
                    if self.is_over.is_set():
                        return

    def _read_request(self, connection: socket.socket) -> bytes | None:
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                return None
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if self._reads_body and line.startswith(b"content-length:"):
                left = int(line.partition(b":")[2]) - len(body)
                while left > 0 and (part := connection.recv(65536)):
                    left -= len(part)
        return head


def http_answer(status: str, headers: str = "", body: bytes = b"") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\n{headers}Connection: close\r\n\r\n".encode("utf-8", "surrogateescape") + body
    )


class FaultyStore:
    """Passes requests on to an object store. Where `fault(method, path)` gives an answer, that is sent instead."""

    def __init__(
        self, upstream: str, fault: Callable[[str, str], tuple[int, dict[str, str], bytes] | None]
    ) -> None:
        owner = self
        self.requests: list[tuple[str, str]] = []
        host = urlsplit(upstream).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                pass

            def _read_body(self) -> bytes:
                if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def _handle(self) -> None:
                body = self._read_body()
                owner.requests.append((self.command, self.path))
                answer = fault(self.command, self.path)
                if answer is None:
                    with contextlib.closing(http.client.HTTPConnection(host, timeout=DEADLINE_S)) as store:
                        dropped = ("transfer-encoding", "content-length", "expect")
                        passed = {n: v for n, v in self.headers.items() if n.lower() not in dropped}
                        store.request(self.command, self.path, body, passed)
                        found = store.getresponse()
                        answer = found.status, dict(found.getheaders()), found.read()
                status, headers, content = answer
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in (
                        "transfer-encoding",
                        "connection",
                        "date",
                        "server",
                        "content-length",
                    ):
                        self.send_header(name, value)
                length = str(len(content))
                if self.command == "HEAD":
                    length = next((v for n, v in headers.items() if n.lower() == "content-length"), "0")
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that go away are part of the tests

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
