"""One connection to a daemon: its address, the token, and retries.

All calls are safe to repeat. A refusal by the daemon is an error; a broken connection is retried until no daemon has
answered for `patience_s`.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trn.core import errors
from trn.core.errors import ConflictError, InvalidRequestError, TrnError, UnavailableError
from trn.core.home import Home, find_home, socket_address
from trn.proto.methods import ERROR_KEY, METHODS, OPEN_KEY, is_loopback

if TYPE_CHECKING:
    import grpc.aio

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
MAX_ANSWER_BYTES = 64 << 20
LAST_COMPLETIONS_S = 0.01

_BROKEN = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL"})
_BY_STATUS: dict[str, Callable[[str], TrnError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "FAILED_PRECONDITION": ConflictError,
    "NOT_FOUND": errors.NotFoundError,
    "PERMISSION_DENIED": errors.ForbiddenError,
    "UNAUTHENTICATED": errors.ForbiddenError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": UnavailableError,
    "RESOURCE_EXHAUSTED": UnavailableError,
}


class Connection:
    """Belongs to the event loop of its first call. Opens nothing before that."""

    def __init__(
        self,
        home: Path | str | None,
        *,
        address: str,
        token: str,
        ca_certificate: Path | str,
        is_insecure: bool,
        patience_s: float,
        timeout_s: float,
    ) -> None:
        if home is not None and address:
            raise InvalidRequestError("give a home or an address, not both")
        if is_insecure and ca_certificate:
            raise InvalidRequestError("is_insecure and ca_certificate exclude each other")
        self.home = None if address else Home(Path(home).expanduser().absolute() if home else find_home())
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._ca_certificate = ca_certificate
        self._is_insecure = is_insecure
        self.patience_s = patience_s
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._calls: dict[str, Any] = {}

    @property
    def where(self) -> str:
        return self._address or f"unix:{self.home.socket if self.home else ''}"

    async def close(self) -> None:
        channel, self._channel, self._calls = self._channel, None, {}
        if channel is not None:
            await channel.close()
            # gRPC has one completion queue for all loops of a process. Completions that come after this loop is closed
            # would be logged as errors by another one.
            await asyncio.sleep(LAST_COMPLETIONS_S)

    async def call(self, name: str, request: Any, *, timeout_s: float | None = None) -> Any:
        """The answer. TrnError if the daemon refuses, UnavailableError if none answers."""
        from grpc.aio import AioRpcError

        patience = _Patience(self.patience_s)
        while True:
            try:
                call = self._method(name)
                return await call(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
            except AioRpcError as fault:
                await self._pause_or_raise(fault, name, patience)

    async def stream(
        self, name: str, next_request: Callable[[], Any], *, is_end: Callable[[Any], bool]
    ) -> AsyncGenerator[Any, None]:
        """Its answers. Reopened with `next_request` after a break; ends with `is_end` or the daemon."""
        from grpc.aio import AioRpcError

        patience = _Patience(self.patience_s)
        while True:
            call = self._method(name)(next_request(), metadata=self._metadata)
            try:
                opening = await call.initial_metadata()  # the first answer may take days
                if any(key == OPEN_KEY for key, _ in opening or ()):
                    patience.answered()
                async for answer in call:
                    patience.answered()
                    yield answer
                    patience.answered()  # not counting the time of our caller
                    if is_end(answer):
                        break
            except AioRpcError as fault:
                await self._pause_or_raise(fault, name, patience, is_stream=True)
            else:
                return
            finally:
                call.cancel()

    async def _pause_or_raise(
        self, fault: "grpc.aio.AioRpcError", name: str, patience: "_Patience", *, is_stream: bool = False
    ) -> None:
        """Streams also retry a daemon that answers UNAVAILABLE: they continue where they were."""
        is_broken = _is_broken(fault)
        if not is_broken and not (is_stream and fault.code().name == "UNAVAILABLE"):
            raise self._error(fault, name) from None
        pause_s = patience.next_pause_s()
        if pause_s is None and not is_broken:
            raise self._error(fault, name) from None
        if pause_s is None:
            raise UnavailableError(self._explain_absence(fault, patience.waited_s)) from None
        await asyncio.sleep(pause_s)

    def _explain_absence(self, fault: "grpc.aio.AioRpcError", waited_s: float) -> str:
        tried = f", tried for {waited_s:.0f} s" if waited_s >= 1 else ""
        if self.home is None:
            return f"no daemon answers at {self.where}{tried} ({fault.details()}): check that it runs and that this is its address"
        from trn.client.daemon_start import name_start

        silence = self._explain_silence()
        if silence is not None:
            return silence
        return f"no daemon answers at {self.where}{tried}: `{name_start(self.home)}` starts one"

    def _explain_silence(self) -> str | None:
        """If a daemon of this home listens but does not answer; None: none listens, or it is unknown."""
        from trn.client.daemon_start import find_daemon, silence_of

        daemon = None if self.home is None else find_daemon(self.home)
        if daemon is None:
            return None
        what, remedy = silence_of(daemon)
        return f"{what}: {remedy}; runs continue meanwhile"

    def _error(self, fault: "grpc.aio.AioRpcError", name: str) -> TrnError:
        text = fault.details() or fault.code().name
        if fault.code().name == "DEADLINE_EXCEEDED":
            late = f"the daemon at {self.where} did not answer {name} in time"
            silence = self._explain_silence()
            return UnavailableError(late if silence is None else f"{late}; {silence}")
        named_error = _error_name(fault)
        if named_error in ("InfeasibleError", "AmbiguousError"):  # more specific than their status
            named: TrnError = getattr(errors, named_error)(text)
            return named
        make = _BY_STATUS.get(fault.code().name)
        return make(text) if make else TrnError(f"{name} failed with {fault.code().name}: {text}")

    def _method(self, name: str) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConflictError("this client belongs to another event loop: create one for each loop")
        if self._channel is None:
            self._channel = self._open()
        call = self._calls.get(name)
        if call is None:
            method = METHODS[name]
            make = self._channel.unary_stream if method.is_stream else self._channel.unary_unary
            call = make(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            self._calls[name] = call
        return call

    def _open(self) -> "grpc.aio.Channel":
        import grpc
        import grpc.aio

        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", 30_000),  # notices a daemon that hangs on a silent stream
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
            # Two clients in one process have two connections: closing one must not affect the other.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        if self.home is not None:
            options.append(("grpc.default_authority", "localhost"))  # else the socket's path, escaped
            return grpc.aio.insecure_channel(f"unix:{socket_address(self.home.socket)}", options=options)
        if self._is_insecure:
            self._require_loopback()
            return grpc.aio.insecure_channel(self._address, options=options)
        roots = None
        if self._ca_certificate:
            try:
                roots = Path(self._ca_certificate).expanduser().read_bytes()
            except OSError as fault:
                raise InvalidRequestError(f"ca_certificate: {fault}") from fault
        credentials = grpc.ssl_channel_credentials(root_certificates=roots)
        return grpc.aio.secure_channel(self._address, credentials, options=options)

    def _require_loopback(self) -> None:
        host = self._address.rpartition(":")[0]
        if not is_loopback(host):
            raise InvalidRequestError(
                f"is_insecure is for loopback only, and {host} is not: the token would be sent unencrypted"
            )


class _Patience:
    """How long no daemon has answered, and the delay before the next try."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._is_fresh = True
        self._begun = self._since = time.monotonic()
        self._num_pauses = 0

    @property
    def waited_s(self) -> float:
        """Since the last answer, or since the first try."""
        return time.monotonic() - self._begun

    def answered(self) -> None:
        self._is_fresh, self._num_pauses, self._begun = True, 0, time.monotonic()

    def next_pause_s(self) -> float | None:
        """None: give up. Jitter spreads the watchers of a restarted daemon."""
        now = time.monotonic()
        if self._is_fresh:
            self._is_fresh, self._since = False, now
        left_s = self._since + self.patience_s - now
        if left_s <= 0:
            return None
        longest_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * (1 << min(self._num_pauses, 16)))
        self._num_pauses += 1
        return min(left_s, longest_s * random.uniform(0.5, 1.0))


def _error_name(fault: "grpc.aio.AioRpcError") -> str:
    for key, value in fault.trailing_metadata() or ():
        if key == ERROR_KEY:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _is_broken(fault: "grpc.aio.AioRpcError") -> bool:
    return fault.code().name in _BROKEN and not _error_name(fault)
