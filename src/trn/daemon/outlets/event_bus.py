"""What a bus is to the daemon: a place to which messages are published, and from which commands may come.

The scheme of its URL finds it: `redis`, `rediss` and `unix` are Redis Streams; others are plug-ins, found by the entry
point of that name in the group `trn.event_buses`, a callable that takes the URL and returns an `EventBus`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

from trn.core.bus_url import BusUrl
from trn.core.errors import BusUnavailableError, InvalidRequestError, TrnError, UnavailableError

__all__ = [
    "BusCommand",
    "BusUnavailableError",
    "CommandStream",
    "EventBus",
    "EventMessage",
    "MemoryBus",
    "Message",
    "RunMessage",
    "open_bus",
]

GROUP = "trn.event_buses"
BUILT_IN = ("redis", "rediss", "unix")


class EventMessage(NamedTuple):
    """One event of a run; `data` is its line, as it is in the run's file."""

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
    """Something that another program asks for. `command_id` names it for good, also when it is read again."""

    command_id: str
    fields: Mapping[str, str]


class CommandStream(Protocol):
    """Commands, each read until it is answered: also by the next daemon, and those that were read before come first."""

    def read(self, timeout_s: float) -> Sequence[BusCommand]:
        """What there is, at least after so long. Blocks."""
        ...

    def answer(self, command: BusCommand, reply_to: str, reply: Mapping[str, str]) -> None:
        """Reply (to the usual place where `reply_to` is empty), then never show this command again. Blocks."""
        ...


class EventBus(Protocol):
    """Every method may be called before the bus is there, blocks, and raises BusUnavailableError where it is away.

    `publish` is called by one thread, the command stream by another, `close` by any.
    """

    def publish(self, messages: Sequence[Message]) -> None:
        """All of them, in this order, or an error: then all of them come again. Returns when the bus has them.

        None at all: a question whether the bus is there.
        """
        ...

    def commands(self) -> CommandStream | None:
        """Where commands come from; None where this bus has none."""
        ...

    def close(self) -> None:
        """Let go of everything; whoever waits in a read comes back."""
        ...


def open_bus(url: BusUrl, *, reader: str) -> EventBus:
    """The bus of that URL; nothing is connected yet. `reader` names this daemon among others that read commands.

    InvalidRequestError where nobody knows the scheme, with those that are known.
    """
    if url.scheme in BUILT_IN:
        from trn.daemon.outlets.redis_streams import RedisBus

        return RedisBus(url, reader=reader)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if url.scheme not in found:
        known = ", ".join([*BUILT_IN, *sorted(found)])
        raise InvalidRequestError(
            f"no event bus is known by the scheme {url.scheme!r} ({url.shown}): known are {known}; install its plug-in,"
            f" which has an entry point of that name in the group {GROUP}"
        )
    try:
        make: Callable[[str], EventBus] = found[url.scheme].load()
        return make(url.raw)
    except TrnError:
        raise
    except Exception as fault:  # its text may hold the URL
        raise UnavailableError(
            f"the event bus {url.shown} cannot be opened: its plug-in {found[url.scheme].value} failed with"
            f" {type(fault).__name__}"
        ) from None


class MemoryBus:
    """A bus in this process, for tests: it remembers what it was given, and can be away."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.replies: list[tuple[str, dict[str, str]]] = []
        self.fault = ""  # why it is away
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
        """Another program asks for something."""
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
        """Whether every command was answered within so long."""
        with self._news:
            return self._news.wait_for(lambda: not self._waiting, timeout_s)

    def _require(self) -> None:
        if self.fault:
            raise BusUnavailableError(self.fault)
