"""The gRPC transport of the service: messages by field name, one gate for every call, one table for every error.

The socket and the TCP port are ports of one server; which of the two a call came by, the transport itself says
(`context.peer()`), not the caller. What did not come through the socket needs a token: also health and reflection.
"""

import logging
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, get_type_hints

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message

from trn.core.errors import InvalidRequestError, UnavailableError
from trn.core.home import Home, socket_address
from trn.core.runs import RunRecord
from trn.core.settings import ListenSettings, Settings
from trn.daemon.api.broadcaster import Published
from trn.daemon.api.service import TrainerService, as_trn_error
from trn.daemon.api.tcp_guard import AUTHENTICATE_S, max_connections
from trn.daemon.api.tokens import require_allowed
from trn.proto import trainer_pb2 as pb
from trn.proto.convert import from_message, read_fields, read_flat, to_message
from trn.proto.methods import ERROR_KEY, METHODS, OPEN_KEY, SERVICE, Method, is_loopback

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

# TrnError.code -> status. A code that is not here is internal.
STATUSES: dict[str, grpc.StatusCode] = {
    "invalid-argument": grpc.StatusCode.INVALID_ARGUMENT,
    "failed-precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "permission-denied": grpc.StatusCode.PERMISSION_DENIED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "resource-exhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "deadline-exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "internal": grpc.StatusCode.INTERNAL,
}
# Statuses travel in HTTP headers, whose size is limited (8 KiB by default); a list of faults may be longer.
MAX_STATUS_BYTES = 4096

Context = grpc.aio.ServicerContext[Any, Any]


async def build_server(
    service: TrainerService,
    *,
    max_open_files: int = 1024,
    admitted: Callable[[str], None] = lambda _peer: None,
) -> grpc.aio.Server:
    """A server with all calls, health and reflection; not started, and without ports.

    `admitted` gets the peer of each call with a valid token.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_health.v1.health import aio as health
    from grpc_reflection.v1alpha import reflection

    limit = ("grpc.max_allowed_incoming_connections", max_connections(max_open_files))
    server = grpc.aio.server(
        options=[*OPTIONS, limit], maximum_concurrent_rpcs=MAX_CALLS, interceptors=[Gate(service, admitted)]
    )
    handlers = {method.name: _make_handler(service, method) for method in METHODS.values()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    servicer = health.HealthServicer()
    await servicer.set(SERVICE.full_name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection((SERVICE.full_name, health_name, reflection.SERVICE_NAME), server)
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


def _make_handler(service: TrainerService, method: Method) -> Any:
    """The service's call of that name: its arguments and its answer by the fields of the messages."""
    call = getattr(service, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower())
    read = _make_reader(call)

    async def answer(request: Any, _context: Context) -> Any:
        return to_message(await call(**read(request)), method.response)

    async def stream(request: Any, context: Context) -> None:
        with service.streams.place(context.cancelled):
            await context.send_initial_metadata(((OPEN_KEY, "1"),))
            async with aclosing(call(**read(request), watcher=context.peer())) as items:
                async for item in items:
                    data = _encode(item, method.response)
                    if data:
                        await context.write(data)

    if method.is_stream:
        return grpc.unary_stream_rpc_method_handler(stream, method.request.FromString, None)
    return grpc.unary_unary_rpc_method_handler(
        answer, method.request.FromString, method.response.SerializeToString
    )


def _make_reader(call: Any) -> Callable[[Any], dict[str, Any]]:
    """From a request to the call's arguments: one record of all its fields, or the fields themselves."""
    function = call.__func__  # not the bound one: what is read from its signature is kept for good
    name, hint = next(iter(get_type_hints(function).items()))
    if name != "return" and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return lambda request: {name: from_message(_with_submission(request), hint)}
    return lambda request: read_fields(request, function)


def _with_submission(request: Any) -> Any:
    """A resume from an older client has the fields of its submission one by one."""
    if isinstance(request, pb.ResumeRunRequest) and not request.HasField("submission"):
        request.submission.CopyFrom(read_flat(request))
    return request


def _encode(item: Any, kind: type[Message]) -> bytes:
    """As bytes: what many watch is encoded once. Messages laid end to end are one with all their runs."""
    if isinstance(item, list):
        return b"".join([_encode(part, kind) for part in item])
    if not isinstance(item, Published):
        return to_message(item, kind).SerializeToString()
    if item.encoded is None:
        is_run = isinstance(item.item, RunRecord)
        message = (
            pb.WatchRunsResponse(runs=[to_message(item.item, pb.Run)], change=item.last)
            if is_run
            else to_message(item.item, pb.StreamEventsResponse)
        )
        item.encoded = message.SerializeToString()
    return item.encoded


class Gate(grpc.aio.ServerInterceptor):
    """Around every call, also of health and reflection: who calls, then what, then the call, then its errors."""

    def __init__(self, service: TrainerService, admitted: Callable[[str], None]) -> None:
        self._service = service
        self._admitted = admitted
        self._guarded: dict[str, Any] = {}

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        path = str(details.method)
        if path not in self._guarded:
            handler = await continuation(details)
            if handler is None:
                return None
            self._guarded[path] = self._guard(handler, path.removeprefix("/"))
        return self._guarded[path]

    def _admit(self, context: Context, raw: Any, handler: Any, path: str) -> Any:
        """The request, if its caller may make it."""
        service, name = self._service, path.rpartition("/")[2]
        peer, grant = context.peer(), None
        if not peer.startswith("unix:"):
            metadata = context.invocation_metadata() or ()
            grant = service.tokens.authenticate([value for key, value in metadata if key == "authorization"])
            self._admitted(peer)
        service.num_calls += 1
        request = raw
        if not handler.request_streaming:
            try:
                request = handler.request_deserializer(raw)
            except DecodeError as fault:
                raise InvalidRequestError(
                    f"the request of {name} cannot be read: it was cut short, or is of another call"
                ) from fault
        require_allowed(grant, name, request, service.nonce_of, service.run_of_artifact, service.server_of)
        return request

    def _guard(self, handler: Any, path: str) -> Any:
        async def answer(raw: Any, context: Context) -> Any:
            try:
                return await handler.unary_unary(self._admit(context, raw, handler, path), context)
            except grpc.aio.AbortError:
                raise
            except Exception as fault:
                return await _abort(context, fault, path)

        async def stream(raw: Any, context: Context) -> None:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            try:
                answers = behaviour(self._admit(context, raw, handler, path), context)
                if isinstance(answers, Awaitable):
                    await answers  # it writes by itself
                else:
                    async for item in answers:
                        await context.write(item)
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError as fault:
                logger.debug("%s: its caller left while it was written to: %s", path, fault)
            except Exception as fault:
                await _abort(context, fault, path)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)


async def _abort(context: Context, fault: Exception, path: str) -> None:
    error = as_trn_error(fault, path)
    if error is not fault and context.done():
        return  # the caller is gone, and that is what failed
    name = type(error).__name__
    status = STATUSES.get(error.code, grpc.StatusCode.INTERNAL)
    await context.abort(status, _cut(str(error)), trailing_metadata=((ERROR_KEY, name),))


def _cut(text: str) -> str:
    raw = text.encode()
    if len(raw) <= MAX_STATUS_BYTES:
        return text
    return raw[: MAX_STATUS_BYTES - 40].decode(errors="ignore") + "\n  … and more"
