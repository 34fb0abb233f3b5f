"""Assembles the gateway: all its parts are built here.

It reads what the daemon wrote and passes commands on. It keeps nothing that could be lost, so it may be killed at any
moment. It ends when the daemon is stopped on purpose, and outlives one that was killed.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import msgspec
import uvicorn
from filelock import FileLock, Timeout

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.files.open_files import raise_open_files
from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.process_identity import ProcessIdentity, boot_id, start_ticks
from trn.core.errors import AlreadyRunningError, InvalidRequestError, UnavailableError
from trn.core.home import Home
from trn.core.settings import HttpSettings, read_address, refuse_open_http
from trn.core.version import VERSION
from trn.gateway.answers import Encoded
from trn.gateway.daemon_link import DaemonLink
from trn.gateway.endpoints import Endpoint, build_router
from trn.gateway.gate.connections import MAX_CONNECTIONS, MAX_HEAD_BYTES, TimedConnection
from trn.gateway.gate.credentials import Credentials
from trn.gateway.gate.guard import Guard
from trn.gateway.openapi import build_document
from trn.gateway.page_files import PageFiles, read_page_files
from trn.gateway.parts import Parts
from trn.gateway.reading.exactness import ExactnessReader
from trn.gateway.reading.stores import Stores
from trn.gateway.routes import (
    artifacts,
    commands,
    comparing,
    documents,
    logs,
    machine,
    metrics,
    run_files,
    runs,
    serving,
    session,
    stream,
)
from trn.proto.methods import is_loopback

logger = logging.getLogger("trn.gateway")

DEFAULT_ADDRESS = "127.0.0.1:0"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
USUAL_PORTS = {"http": 80, "https": 443}
KEEP_ALIVE_S = 30
STOP_GRACE_S = 2
BACKLOG = 1024
MAX_OPEN_FILES = 8192
MAX_PORT_BYTES = 16

ENDPOINTS: list[Endpoint] = [
    *session.ENDPOINTS,
    *runs.ENDPOINTS,
    *commands.ENDPOINTS,
    *metrics.ENDPOINTS,
    *comparing.ENDPOINTS,
    *serving.ENDPOINTS,
    *run_files.ENDPOINTS,
    *artifacts.ENDPOINTS,
    *logs.ENDPOINTS,
    *machine.ENDPOINTS,
    *stream.ENDPOINTS,
    *documents.ENDPOINTS,
]


class GatewayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`gateway.json`: whose reader may do everything here. For the home's owner alone."""

    pid: int
    process: str  # its identity
    url: str
    bearer: str
    version: str
    address: str
    started_ms: int
    certificate: str = ""


class Gateway:
    """The gateway of one home. `serve` returns after `stop`, SIGTERM, SIGINT or the daemon's own stop."""

    def __init__(self, home: Home, settings: HttpSettings, address: str = "") -> None:
        self._home = home
        self._settings = settings
        self._address = address or settings.address or DEFAULT_ADDRESS
        self._stop = asyncio.Event()

    def stop(self, reason: str) -> None:
        """End `serve`. From the loop's thread."""
        if not self._stop.is_set():
            logger.info("stopping: %s", reason)
        self._stop.set()

    async def serve(self) -> None:
        """TrnError if it cannot start."""
        host, port = read_address(self._address)
        context = self._open_tls(host)
        with self._holding_home(), self._bind(host, port) as listener:
            _, max_open_files = raise_open_files(MAX_OPEN_FILES)
            TimedConnection.max_connections = min(MAX_CONNECTIONS, max_open_files // 2)
            port = listener.getsockname()[1]
            scheme = "http" if context is None else "https"
            hosts = name_hosts(host, port, self._settings.names, scheme)
            parts = Parts(
                home=self._home,
                url=f"{scheme}://{hosts[0]}",
                started_ms=time.time_ns() // 1_000_000,
                credentials=Credentials(port),
                stores=Stores(self._home),
                daemon=DaemonLink(self._home, time.time_ns() // 1_000_000),
                exactness=ExactnessReader(self._home),
                openapi=Encoded.of(build_document(ENDPOINTS)),
            )
            guard = Guard(
                api=build_router(ENDPOINTS, parts),
                page=PageFiles(read_page_files()),
                credentials=parts.credentials,
                hosts=hosts,
                scheme=scheme,
            )
            try:
                await self._run(parts, _Server(guard, context), listener)
            finally:
                await parts.daemon.close()
                parts.stores.close()

    @contextlib.contextmanager
    def _bind(self, host: str, port: int) -> Iterator[socket.socket]:
        """Any free port is the one of before, where it is still free: links and open pages lead to it."""
        with contextlib.ExitStack() as stack:
            listener = None
            if port == 0:
                with contextlib.suppress(OSError, ValueError, OverflowError, UnavailableError):
                    before = int(read_regular(self._home.gateway_port, MAX_PORT_BYTES))
                    listener = stack.enter_context(bind(host, before))
            if listener is None:
                listener = stack.enter_context(bind(host, port))
            if port == 0:
                text = str(listener.getsockname()[1]).encode()
                with contextlib.suppress(OSError):  # a link less that lasts
                    replace_file(self._home.gateway_port, text, sync="none", mode=0o600)
            yield listener

    async def _run(self, parts: Parts, server: "_Server", listener: socket.socket) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            watching = tasks.create_task(parts.daemon.run(self.stop))
            await server.is_open.wait()
            with _signals(self.stop):
                self._announce(parts, listener)
                logger.info("trn %s serves %s at %s", VERSION, self._home.root, parts.url)
                await self._stop.wait()
            self._home.gateway_info.unlink(missing_ok=True)
            parts.stopped.set()
            server.should_exit = True
            await serving
            watching.cancel()

    def _announce(self, parts: Parts, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        identity = ProcessIdentity(boot_id(), os.getpid(), start_ticks(os.getpid()))
        info = GatewayInfo(
            pid=os.getpid(),
            process=identity.ref,
            url=parts.url,
            bearer=parts.credentials.bearer,
            version=VERSION,
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            started_ms=parts.started_ms,
            certificate=self._settings.certificate,
        )
        replace_file(self._home.gateway_info, msgspec.json.encode(info), sync="none", mode=0o600)

    @contextlib.contextmanager
    def _holding_home(self) -> Iterator[None]:
        """One gateway per home: a lock, which the system releases when the process ends."""
        lock = FileLock(self._home.gateway_lock, timeout=0, thread_local=False, mode=0o600)
        try:
            lock.acquire()
        except Timeout:
            raise AlreadyRunningError(
                f"another gateway runs for {self._home.root}: `trn ui` opens it, `trn ui --stop` stops it"
            ) from None
        except OSError as fault:
            raise UnavailableError(f"{self._home.gateway_lock} cannot be locked: {fault.strerror}") from fault
        try:
            yield
        finally:
            lock.release()

    def _open_tls(self, host: str) -> ssl.SSLContext | None:
        certificate, private_key = self._settings.certificate, self._settings.private_key
        if not certificate and not private_key:
            if is_loopback(host):
                return None
            raise refuse_open_http(self._address, self._home.settings)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, private_key or None)
        except (OSError, ssl.SSLError) as fault:
            raise InvalidRequestError(
                f"[http] in {self._home.settings}: the certificate {certificate!r} and the private_key {private_key!r}"
                f" cannot be used: {fault}"
            ) from fault
        return context


class _Server(uvicorn.Server):
    """uvicorn without its own handling of signals, logs and forwarded headers."""

    def __init__(self, app: Guard, context: ssl.SSLContext | None) -> None:
        config = uvicorn.Config(
            app,
            http=TimedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_GRACE_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self.is_open = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_open.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def name_hosts(host: str, port: int, names: list[str], scheme: str = "http") -> list[str]:
    """What the header Host may be; the first one is for links. A browser leaves out the usual port of a scheme."""
    is_everywhere = host in ("0.0.0.0", "::")  # noqa: S104
    own = [] if is_everywhere else [f"[{host}]" if ":" in host else host]
    local = LOOPBACK_NAMES if is_everywhere or is_loopback(host) else ()
    found: list[str] = []
    for name in (*names, *own, *local):
        has_port = name.rpartition(":")[2].isdigit() and not name.endswith("]")
        found.append(name.lower() if has_port else f"{name.lower()}:{port}")
        if not has_port and port == USUAL_PORTS[scheme]:
            found.append(name.lower())
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sends small answers at once (TCP_NODELAY); else each may wait 40 ms for an ACK.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as fault:
            raise UnavailableError(
                f"{host}:{port} cannot be used: {fault.strerror}; give another one with --address, or port 0 for any"
            ) from fault
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, f"received {number.name}")
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
