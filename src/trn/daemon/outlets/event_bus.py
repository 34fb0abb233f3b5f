"""The interface of an event bus: the daemon publishes messages to it, and may read commands from it.

The scheme of the URL selects it. `redis`, `rediss` and `unix` are Redis Streams. Others are plug-ins: an entry point of
that name in the group `trn.event_buses`, a callable that takes the URL and returns an `EventBus`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

from trn.core.bus_url import BusUrl
from trn.core.errors import BusUnavailableError, InvalidRequestError, TrnError, UnavailableError

# With the error that plug-ins raise.
__all__ = [
    "BusCommand",
    "BusUnavailableError",
    "CommandStream",
    "EventBus",
    "EventMessage",
    "Message",
    "RunMessage",
]

GROUP = "trn.event_buses"
BUILT_IN = ("redis", "rediss", "unix")


class EventMessage(NamedTuple):
    """One event of a run; `data` is its line in the run's file."""

    run_id: str
    seq: int
    event: str
    data: bytes


class RunMessage(NamedTuple):
    """A run whose state has changed; `data` is its record as JSON, without its config."""

    run_id: str
    state: str
    change: int
    data: bytes


Message = EventMessage | RunMessage


class BusCommand(NamedTuple):
    """A request of another program. `command_id` stays the same when it is read again."""

    command_id: str
    fields: Mapping[str, str]


class CommandStream(Protocol):
    """Commands. Each is read again, also by the next daemon, until it is answered; those come first."""

    def read(self, timeout_s: float) -> Sequence[BusCommand]:
        """The commands that wait; blocks up to the timeout for the first."""
        ...

    def answer(self, command: BusCommand, reply_to: str, reply: Mapping[str, str]) -> None:
        """Reply (to the default stream if `reply_to` is empty), then never return this command again. Blocks."""
        ...


class EventBus(Protocol):
    """Connects when it is used. Every method blocks, and raises BusUnavailableError if the bus is not available.

    One thread calls `publish`, another reads the command stream, any thread may call `close`.
    """

    def publish(self, messages: Sequence[Message]) -> None:
        """All messages in this order, or an error; then all are published again. Returns when the bus has them.

        Without messages: checks the connection.
        """
        ...

    def commands(self) -> CommandStream | None:
        """None if this bus has no commands."""
        ...

    def close(self) -> None:
        """Close all connections; a read that waits returns."""
        ...


def open_bus(url: BusUrl, *, reader: str) -> EventBus:
    """The bus of that URL, not connected yet. `reader` identifies this daemon among the readers of commands.

    InvalidRequestError if the scheme is unknown.
    """
    if url.scheme in BUILT_IN:
        from trn.daemon.outlets.redis_streams import RedisBus

        return RedisBus(url, reader=reader)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if url.scheme not in found:
        known = ", ".join([*BUILT_IN, *sorted(found)])
        raise InvalidRequestError(
            f"unknown scheme {url.scheme!r} of the event bus {url.shown}; known schemes: {known}. Install a plug-in"
            f" with an entry point of that name in the group {GROUP}"
        )
    try:
        make: Callable[[str], EventBus] = found[url.scheme].load()
        return make(url.raw)
    except TrnError:
        raise
    except Exception as fault:  # its text may contain the URL
        raise UnavailableError(
            f"the event bus {url.shown} cannot be opened: its plug-in {found[url.scheme].value} failed with"
            f" {type(fault).__name__}"
        ) from None


class MemoryBus:
    """A bus in memory, for tests."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.replies: list[tuple[str, dict[str, str]]] = []
        self.fault = ""  # set: the bus is not available
        self._is_closed = False
        self._waiting: dict[str, BusCommand] = {}
        self._news = threading.Condition()

    def publish(self, messages: Sequence[Message]) -> None:
        self._require()
        self.messages += messages

    def commands(self) -> "CommandStream | None":
        return self

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def ask(self, command: BusCommand) -> None:
        """Add a command, as another program does."""
        with self._news:
            self._waiting[command.command_id] = command
            self._news.notify_all()

    def read(self, timeout_s: float) -> Sequence[BusCommand]:
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._is_closed, timeout_s)
            self._require()
            return list(self._waiting.values())

    def answer(self, command: BusCommand, reply_to: str, reply: Mapping[str, str]) -> None:
        with self._news:
            self._require()
            self.replies.append((reply_to, dict(reply)))
            self._waiting.pop(command.command_id, None)
            self._news.notify_all()

    def wait_answered(self, timeout_s: float) -> bool:
        """Whether every command is answered within the timeout."""
        with self._news:
            return self._news.wait_for(lambda: not self._waiting, timeout_s)

    def _require(self) -> None:
        if self.fault:
            raise BusUnavailableError(self.fault)
