"""The gRPC server: every call passes one gate, and every error one table.

The socket and the TCP port are ports of one server; which of the two a call came by, the transport itself says
(`context.peer()`), not the caller. What did not come through the socket needs a token: also health and reflection.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from trn.core.errors import InvalidRequestError, TrnError, UnavailableError
from trn.core.home import Home, socket_address
from trn.core.settings import ListenSettings, Settings
from trn.daemon.api.statuses import status_of
from trn.daemon.api.tcp_guard import AUTHENTICATE_S, max_connections
from trn.daemon.api.tokens import ApiTokens, RunGrant, require_allowed
from trn.daemon.upkeep.own_trouble import is_own_trouble
from trn.proto.addresses import is_loopback
from trn.proto.methods import ERROR_KEY, METHODS, SERVICE

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
MAX_STREAMS_PER_CONNECTION = 4096
MAX_CALLS = 32_768

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    ("grpc.so_reuseport", 0),  # a second daemon on the same port is an error, not a lottery
    ("grpc.keepalive_time_ms", 60_000),  # a watcher whose machine vanished is found out
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", int(AUTHENTICATE_S * 1000)),
]

Context = grpc.aio.ServicerContext[Any, Any]


class Calls(Protocol):
    """The service: a coroutine method for each call of the proto, that returns a message, or for streams writes bytes."""

    tokens: ApiTokens
    num_calls: int

    def nonce_of(self, run_id: str) -> str | None: ...


def build_server(
    service: Calls,
    *,
    settings: Settings,
    home: Home,
    max_open_files: int = 1024,
    admitted: Callable[[str], None] = lambda _peer: None,
) -> grpc.aio.Server:
    """A server with all calls, health and reflection; not started, and without ports.

    `admitted` is told the peer of each call that showed a valid token.
    """
    del settings, home
    limit = ("grpc.max_allowed_incoming_connections", max_connections(max_open_files))
    server = grpc.aio.server(options=[*OPTIONS, limit], maximum_concurrent_rpcs=MAX_CALLS)
    for name, handlers in _all_handlers(service).items():
        guarded = {
            method: _guard(handler, method, f"{name}/{method}", service, admitted)
            for method, handler in handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, guarded),))
    return server


def add_ports(server: grpc.aio.Server, settings: Settings, home: Home) -> list[str]:
    """Bind the socket, and TCP where the settings name an address. The addresses, the socket's first."""
    credentials = _tcp_credentials(settings.listen)  # before anything is bound
    # The folder is private already; the mask closes the moment between bind and chmod as well.
    mask = os.umask(0o177)
    try:
        _bind(f"unix:{socket_address(home.socket)}", server.add_insecure_port)
    finally:
        os.umask(mask)
    home.socket.chmod(0o600)
    addresses = [f"unix:{home.socket}"]
    address = settings.listen.address
    if address:
        if credentials is None:
            port = _bind(address, server.add_insecure_port)
        else:
            port = _bind(address, lambda where: server.add_secure_port(where, credentials))
        addresses.append(f"{address.rpartition(':')[0]}:{port}")
    return addresses


def _bind(address: str, add: Callable[[str], int]) -> int:
    try:
        return add(address)
    except RuntimeError as fault:
        raise UnavailableError(
            f"{address} cannot be listened on: it is taken, or not an address of this machine"
        ) from fault


def _tcp_credentials(listen: ListenSettings) -> grpc.ServerCredentials | None:
    if not listen.address:
        return None
    host, colon, port = listen.address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise InvalidRequestError(f"listen.address is {listen.address!r}, expected host:port")
    if listen.certificate and listen.private_key:
        if listen.is_insecure:
            raise InvalidRequestError("listen has a certificate and is_insecure: leave one of them out")
        return grpc.ssl_server_credentials([(_read(listen.private_key), _read(listen.certificate))])
    if listen.certificate or listen.private_key:
        raise InvalidRequestError("listen needs both: certificate and private_key")
    if not listen.is_insecure:
        raise InvalidRequestError(
            f"listen.address is {listen.address}, without TLS: set listen.certificate and listen.private_key, or, on"
            " loopback alone, listen.is_insecure"
        )
    if not is_loopback(host):
        raise InvalidRequestError(
            f"listen.is_insecure is for loopback alone, and {host} is not: tokens would travel in the clear; set"
            " listen.certificate and listen.private_key"
        )
    return None


def _read(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as fault:
        raise InvalidRequestError(f"listen: {path} cannot be read: {fault.strerror}") from fault


class _Collector:
    """Stands in for a server, so that the services of other packages can be put behind the gate too."""

    def __init__(self) -> None:
        self.handlers: dict[str, dict[str, Any]] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers[service] = handlers

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass  # the same ones once more


def _all_handlers(service: Calls) -> dict[str, dict[str, Any]]:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_health.v1.health import aio as health
    from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

    found: Any = _Collector()
    servicer = health.HealthServicer()
    servicer._server_status[SERVICE.full_name] = health_pb2.HealthCheckResponse.SERVING
    health_pb2_grpc.add_HealthServicer_to_server(servicer, found)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    names = (SERVICE.full_name, health_name, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
        reflection.aio.ReflectionServicer(names), found
    )
    own: dict[str, Any] = {}
    for method in METHODS.values():
        behaviour = getattr(service, method.name)
        if method.is_stream:
            # An item is encoded once, for all who watch: the calls write bytes.
            own[method.name] = grpc.unary_stream_rpc_method_handler(
                behaviour, method.request.FromString, None
            )
        else:
            own[method.name] = grpc.unary_unary_rpc_method_handler(
                behaviour, method.request.FromString, method.response.SerializeToString
            )
    return {SERVICE.full_name: own, **found.handlers}


def _guard(handler: Any, name: str, path: str, service: Calls, admitted: Callable[[str], None]) -> Any:
    """The same handler behind the gate: who calls, then what, then the call, and its errors by the table."""
    parse = handler.request_deserializer

    def admit(context: Context, raw: Any) -> Any:
        peer, caller = context.peer(), None
        if not peer.startswith("unix:"):
            caller = _caller(context, service.tokens)
            admitted(peer)
        service.num_calls += 1
        if handler.request_streaming:
            request = raw
        else:
            try:
                request = parse(raw)
            except DecodeError as fault:
                raise InvalidRequestError(
                    f"the request of {name} cannot be read: it was cut short, or is of another call"
                ) from fault
        require_allowed(caller, name, request, service.nonce_of)
        return request

    async def answer(raw: Any, context: Context) -> Any:
        try:
            return await handler.unary_unary(admit(context, raw), context)
        except grpc.aio.AbortError:
            raise
        except Exception as fault:
            return await _abort(context, fault, path)

    async def stream(raw: Any, context: Context) -> None:
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
        try:
            answers = behaviour(admit(context, raw), context)
            if isinstance(answers, Awaitable):
                await answers  # it writes by itself
            else:
                async for item in answers:
                    await context.write(item)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as fault:
            # Its caller went away in the very moment in which it was written to.
            logger.debug("%s: %s", path, fault)
        except Exception as fault:
            await _abort(context, fault, path)

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(
            stream, handler.request_deserializer, handler.response_serializer
        )
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)


def _caller(context: Context, tokens: ApiTokens) -> RunGrant | None:
    metadata = context.invocation_metadata() or ()
    return tokens.authenticate([value for key, value in metadata if key == "authorization"])


async def _abort(context: Context, fault: Exception, path: str) -> None:
    if not isinstance(fault, TrnError) and is_own_trouble(fault):
        logger.warning("%s: %s", path, fault)
        fault = UnavailableError(f"the daemon cannot answer now: {fault}; try again")
    status, message = status_of(fault, method=path)
    if not isinstance(fault, TrnError) and context.done():
        return  # the caller is gone, and that is what failed
    name = type(fault).__name__ if isinstance(fault, TrnError) else "TrnError"
    await context.abort(status, message, trailing_metadata=((ERROR_KEY, name),))
