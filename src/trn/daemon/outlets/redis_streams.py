"""The event bus on Redis Streams: `trn:events`, `trn:runs`, and commands in `trn:commands` with `trn:replies`.

Each `publish` is one transaction (MULTI, EXEC): Redis takes all of it or nothing, also if it runs out of memory or becomes
a replica meanwhile. So no event is there before an earlier one. If the answer of Redis is lost, the same entries are
published again.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from trn.core.bus_url import OPTIONS, BusUrl
from trn.core.errors import BusUnavailableError, InvalidRequestError, UnavailableError
from trn.daemon.outlets.event_bus import BusCommand, CommandStream, Message, RunMessage

if TYPE_CHECKING:
    import redis

PREFIX = "trn"
MAX_LENGTH = 100_000  # of a stream; Redis drops the oldest entries in blocks
GROUP = "trn"
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 10.0
COMMANDS_AT_ONCE = 16

_MULTI, _EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"


class RedisBus:
    """Connects when it is first used, and again after each error. See `EventBus` for threads."""

    def __init__(self, url: BusUrl, *, reader: str) -> None:
        self._shown = url.shown
        self._prefix = url.options.get("prefix") or PREFIX
        self.max_length = _read_max_length(url.options.get("maxlen"))
        has_commands = _read_switch(url.options.get("commands"))
        self._client = _make_client(url)
        self._connection: Any = None
        self._event_head = self._pack_head("events")
        self._run_head = self._pack_head("runs")
        self._commands = RedisCommands(self, self._client, reader) if has_commands else None

    def stream(self, name: str) -> bytes:
        return f"{self._prefix}:{name}".encode()

    def commands(self) -> CommandStream | None:
        return self._commands

    def publish(self, messages: Sequence[Message]) -> None:
        with self.faults():
            try:
                connection = self._connect()
                if not messages:
                    connection.send_command("PING")
                    connection.read_response()
                    return
                # Packed here: the library takes five times as long.
                connection.send_packed_command([_MULTI, b"".join(map(self._pack, messages)), _EXEC])
                for _ in range(1 + len(messages)):  # after an error here EXEC does nothing
                    connection.read_response()
                for answer in connection.read_response():
                    if isinstance(answer, Exception):
                        raise answer
            except BaseException:
                self._disconnect()  # unread answers must not be taken for those of the next command
                raise

    def close(self) -> None:
        self._disconnect()
        with contextlib.suppress(Exception):
            self._client.close()

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Every error of the library becomes a BusUnavailableError."""
        import redis

        try:
            yield
        except (redis.RedisError, OSError) as fault:
            raise BusUnavailableError(str(fault) or type(fault).__name__) from fault

    def _connect(self) -> Any:
        if self._connection is None:
            connection: Any = self._client.connection_pool.make_connection()
            connection.connect()
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.disconnect()

    def _pack_head(self, stream: str) -> bytes:
        """The beginning of an XADD, up to its four fields."""
        words = [b"XADD", self.stream(stream), b"MAXLEN", b"~", b"%d" % self.max_length, b"*"]
        return b"*%d\r\n" % (len(words) + 8) + b"".join(map(_pack_bulk, words))

    def _pack(self, message: Message) -> bytes:
        run_id, data = message.run_id.encode(), message.data
        if isinstance(message, RunMessage):
            state, change = message.state.encode(), b"%d" % message.change
            fields = [b"run_id", run_id, b"state", state, b"change", change, b"data", data]
            return self._run_head + b"".join(map(_pack_bulk, fields))
        seq, event = b"%d" % message.seq, message.event.encode()
        return (
            b"%b$6\r\nrun_id\r\n$%d\r\n%b\r\n$3\r\nseq\r\n$%d\r\n%b\r\n"
            b"$5\r\nevent\r\n$%d\r\n%b\r\n$4\r\ndata\r\n$%d\r\n%b\r\n"
            % (self._event_head, len(run_id), run_id, len(seq), seq, len(event), event, len(data), data)
        )


class RedisCommands:
    """Commands in a consumer group: an entry stays pending until it is answered, also for the next daemon here.

    For one thread. Answered entries are deleted.
    """

    def __init__(self, bus: RedisBus, client: "redis.Redis", reader: str) -> None:
        self._bus = bus
        self._client = client
        self._reader = reader
        self._stream = bus.stream("commands")
        self._ours = {self._stream, bus.stream("events"), bus.stream("runs")}
        self._replies = bus.stream("replies")
        # The last pending entry that was read; ">": all were, read new ones. None: not connected.
        self._place: str | None = None

    def read(self, timeout_s: float) -> Sequence[BusCommand]:
        with self._bus.faults():
            try:
                if self._place is None:
                    self._make_group()
                    self._place = "0"
                is_new = self._place == ">"
                answer: Any = self._client.xreadgroup(
                    GROUP,
                    self._reader,
                    {self._stream: self._place},
                    count=COMMANDS_AT_ONCE,
                    block=max(1, int(timeout_s * 1000)) if is_new else None,
                )
                found = [(_text(entry), fields) for _, entries in answer or () for entry, fields in entries]
                if not is_new:
                    self._place = found[-1][0] if found else ">"
            except BaseException:
                self._place = None
                raise
        return [BusCommand(entry, _read_fields(fields or {})) for entry, fields in found]

    def answer(self, command: BusCommand, reply_to: str, reply: Mapping[str, str]) -> None:
        target = reply_to.encode()
        if not target or target in self._ours:
            target = self._replies
        with self._bus.faults():
            try:
                pipe = self._client.pipeline(transaction=True)
                if reply:
                    fields: Any = dict(reply)  # the library types it more widely, and a dict is not covariant
                    pipe.xadd(target, fields, maxlen=self._bus.max_length)
                pipe.xack(self._stream, GROUP, command.command_id)
                pipe.xdel(self._stream, command.command_id)
                answers = pipe.execute(raise_on_error=False)
            except BaseException:
                self._place = None  # start again with entries that are not answered
                raise
        if isinstance(answers[0], Exception):
            raise InvalidRequestError(f"the reply could not be written to {_text(target)}: {answers[0]}")

    def _make_group(self) -> None:
        import redis

        try:
            self._client.xgroup_create(self._stream, GROUP, id="0", mkstream=True)
        except redis.ResponseError as fault:
            if "BUSYGROUP" not in str(fault):
                raise


def _make_client(url: BusUrl) -> "redis.Redis":
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise UnavailableError(
            f"the event bus {url.shown} needs the redis package: pip install 'trn[redis]'"
        ) from None
    base, _, query = url.raw.partition("?")
    theirs = urlencode([(name, value) for name, value in parse_qsl(query) if name not in OPTIONS])
    try:
        client = redis.Redis.from_url(
            f"{base}?{theirs}" if theirs else base,
            protocol=2,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # BusPublisher retries
        )
        client.connection_pool.make_connection()  # does not connect: only checks the options
    except (redis.RedisError, ValueError, TypeError) as fault:
        raise InvalidRequestError(
            f"the Redis client cannot read the URL {url.shown} of the event bus ({type(fault).__name__}): check its"
            " options after '?'"
        ) from None
    return client


def _read_max_length(text: str | None) -> int:
    if text is None:
        return MAX_LENGTH
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= 10**9:
        raise InvalidRequestError(
            f"the event bus has maxlen={text[:20]!r}, expected a number of entries from 1 to 1000000000"
        )
    return int(text)


def _read_switch(text: str | None) -> bool:
    if text not in (None, "on", "off"):
        raise InvalidRequestError(f"the event bus has commands={text[:20]!r}, expected on or off")
    return text != "off"


def _pack_bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _read_fields(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """As text. If it is not UTF-8, `command` is replaced by an unknown one."""
    fields = {_text(name): _text(value) for name, value in raw.items()}
    is_text = all(text.encode() in raw for text in fields) and all(
        fields[_text(name)].encode() == value for name, value in raw.items()
    )
    return fields if is_text else {**fields, "command": "(not UTF-8 text)"}


def _text(data: Any) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else str(data)
