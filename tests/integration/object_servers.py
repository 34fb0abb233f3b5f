"""Servers for tests of downloads and uploads: an HTTP server that misbehaves on request, and an S3 one.

A test imports the fixtures it wants by name: `from object_servers import http_server, s3_server`.
"""

import base64
import hashlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

DEADLINE_S = 30.0


@dataclass(kw_only=True)
class Reply:
    """How one request is answered instead of normally."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after_bytes: int | None = None  # send the normal answer, but break the connection after so many bytes
    hold: threading.Event | None = None  # answer only when it is set
    drop: bool = False  # break the connection without an answer


@dataclass(kw_only=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    has_valid_digest: bool = False


class ObjectHttpServer:
    """Serves `files` with ETag, Range and If-Range; takes POSTs; `script[path]` overrides one request each."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.script: dict[str, deque[Reply]] = defaultdict(deque)
        self.always: dict[str, Reply] = {}
        self.requests: list[Request] = []
        self.with_etag = True
        self.with_ranges = True
        self.extra_headers: dict[str, str] = {}
        self.arrived = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body go in two writes

            def do_GET(self) -> None:
                owner._answer_get(self)

            def do_POST(self) -> None:
                owner._answer_post(self)

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that go away are part of the tests

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def seen(self, path: str) -> list[Request]:
        with self.arrived:
            return [request for request in self.requests if request.path.partition("?")[0] == path]

    def wait_for_requests(self, path: str, count: int) -> list[Request]:
        return wait_until(lambda: found if len(found := self.seen(path)) >= count else None, self.arrived)

    def _note(self, handler: BaseHTTPRequestHandler, body: bytes = b"") -> Reply | None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        claimed = headers.get("content-digest", "")
        actual = f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
        request = Request(
            method=handler.command,
            path=handler.path,
            headers=headers,
            body=body,
            has_valid_digest=claimed == actual,
        )
        path = handler.path.partition("?")[0]
        with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
            return self.script[path].popleft() if self.script[path] else self.always.get(path)

    def _answer_get(self, handler: BaseHTTPRequestHandler) -> None:
        reply = self._note(handler)
        path = handler.path.partition("?")[0]
        if self._answer_scripted(handler, reply):
            return
        if path not in self.files:
            self._send(handler, 404, {}, b"")
            return
        data = self.files[path]
        headers = dict(self.extra_headers)
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.with_etag:
            headers["ETag"] = etag
            if handler.headers.get("If-None-Match") == etag:
                self._send(handler, 304, headers, b"")
                return
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        if_range = handler.headers.get("If-Range")
        status, body = 200, data
        if wanted and self.with_ranges and if_range in (None, etag):
            start = int(wanted[1])
            if start >= len(data):
                self._send(handler, 416, {"Content-Range": f"bytes */{len(data)}"}, b"")
                return
            status, body = 206, data[start:]
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(handler, status, headers, body, cut_after=reply.cut_after_bytes if reply else None)

    def _answer_post(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        reply = self._note(handler, body)
        if not self._answer_scripted(handler, reply):
            self._send(handler, 201, {}, b"{}")

    def _answer_scripted(self, handler: BaseHTTPRequestHandler, reply: Reply | None) -> bool:
        if reply is None:
            return False
        if reply.hold is not None:
            reply.hold.wait(DEADLINE_S)
        if reply.drop:
            self._break(handler)
            return True
        if reply.status is None:
            return False
        self._send(handler, reply.status, reply.headers, reply.body)
        return True

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes,
        cut_after: int | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body if cut_after is None else body[:cut_after])
        if cut_after is not None:
            self._break(handler)

    def _break(self, handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.flush()
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)


def wait_until(probe: Callable[[], object], condition: threading.Condition | None = None):
    """The first true value of `probe`; fails the test after a generous deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := probe():
            return value
        if condition is None:
            time.sleep(0.005)
        else:
            with condition:
                condition.wait(0.05)
    raise AssertionError("what the test waits for did not happen")


def closed_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def http_server() -> Iterator[ObjectHttpServer]:
    server = ObjectHttpServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 server; credentials for it are in the environment while it runs."""
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


@pytest.fixture
def s3_server(s3_endpoint: str) -> Iterator[SimpleNamespace]:
    """`endpoint`, a fresh `bucket`, and `client` (boto3) to look at it."""
    import uuid

    import boto3

    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    yield SimpleNamespace(endpoint=s3_endpoint, bucket=bucket, client=client)
    client.close()


@pytest.fixture
def gcs_endpoint() -> Iterator[str]:
    """The address of a stand-in for Google Cloud Storage."""
    program = Path(__file__).with_name("gcs_stand_in.py")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.terminate()
    process.wait(DEADLINE_S)
    process.stdout.close()
