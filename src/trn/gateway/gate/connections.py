"""Connections of the HTTP server: time limits for slow senders, and a limit on how many there are.

uvicorn waits for ever for the head of a request. Here a connection has HEAD_S for it, from its start or from the first
byte of a further request. Beyond MAX_CONNECTIONS the oldest one without a request in progress is closed, so that idle
connections make room for new ones.
"""

import asyncio
import logging
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("trn.gateway")

HEAD_S = 10.0
MAX_CONNECTIONS = 1024
MAX_HEAD_BYTES = 32 << 10
SAY_EVERY_S = 60.0


class TimedConnection(H11Protocol):
    """One connection. Its class knows all of them: there is one server in a process."""

    head_s = HEAD_S
    max_connections = MAX_CONNECTIONS
    _waiting: "dict[TimedConnection, None]" = {}  # noqa: RUF012  without a request in progress, the oldest first
    _num_open = 0
    _say_again_at = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        TimedConnection._num_open += 1
        self._waiting[self] = None
        self._begin_head()
        if TimedConnection._num_open > self.max_connections:
            self._close_oldest()

    def connection_lost(self, exc: Exception | None) -> None:
        TimedConnection._num_open -= 1
        self._waiting.pop(self, None)
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            self._end_head()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._waiting.pop(self, None)
            self._end_head()
        elif self._head_timer is None:  # a further request has begun
            self._begin_head()

    def on_response_complete(self) -> None:
        self._waiting[self] = None
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # it was sent ahead
            self._waiting.pop(self, None)

    def _begin_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._give_up)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _close_oldest(self) -> None:
        oldest = next(iter(self._waiting))  # at the latest this one itself
        oldest.transport.abort()
        self._waiting.pop(oldest, None)
        now = time.monotonic()
        if now >= TimedConnection._say_again_at:
            TimedConnection._say_again_at = now + SAY_EVERY_S
            logger.warning("more than %d connections: the oldest idle ones are closed", self.max_connections)
