"""What all connections of a front share: its routes, who may ask, and limits over all of them."""

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gen_worker.inference.front.http.exchange import Exchange, Route
from gen_worker.inference.front.http.heads import KnownHeads
from gen_worker.inference.front.refusals import Refusal

if TYPE_CHECKING:
    from gen_worker.inference.front.http.connection import Connection

HEAD_S = 10.0
BODY_S = 60.0
UNREAD_S = 60.0  # how long a client may not read its answers
SWEEP_S = 0.5
MAX_CONNECTIONS = 1024


@dataclass(slots=True, kw_only=True)
class Reception:
    """One for a front."""

    routes: Mapping[bytes, Route]
    max_body_bytes: int
    max_unfinished_bytes: int  # of all bodies that are being received
    new_id: Callable[[], bytes]
    answered: "Callable[[Exchange, int], None]"  # for the counters: with the status
    failed: "Callable[[Exchange, str], Refusal]"  # logs the exception that is being handled
    bearer: bytes | None = None  # None: requests need none
    max_connections: int = MAX_CONNECTIONS
    head_s: float = HEAD_S
    body_s: float = BODY_S
    unread_s: float = UNREAD_S
    is_closing: bool = False  # answers end their connection
    known: KnownHeads = field(default_factory=KnownHeads)
    unfinished_bytes: int = 0
    connections: "dict[Connection, None]" = field(default_factory=dict)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)  # set whenever the last connection is lost
    idle: "dict[Connection, None]" = field(default_factory=dict)  # the longest first

    def admits(self, authorization: bytes | None) -> bool:
        if self.bearer is None:
            return True
        if authorization is not None and hmac.compare_digest(authorization, b"Bearer " + self.bearer):
            return True
        scheme, _, given = (authorization or b"").partition(b" ")
        return hmac.compare_digest(given.strip(), self.bearer) and scheme.lower() == b"bearer"

    def sweep(self) -> None:
        """Close connections whose client is too slow. To be called every SWEEP_S."""
        now = time.monotonic()
        for connection in [*self.connections]:
            connection.close_if_slow(now)

    def make_room(self) -> None:
        """Idle connections make room for new ones; where all are busy, the newest is closed."""
        while len(self.connections) > self.max_connections:
            victim = next(iter(self.idle), None) or next(reversed(self.connections))
            victim.abort()

    def forget(self, connection: "Connection") -> None:
        self.connections.pop(connection, None)
        self.idle.pop(connection, None)
        if not self.connections:
            self.emptied.set()
