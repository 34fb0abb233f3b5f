"""What the handlers of a gateway share. Built once, by `app`."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from trn.core.home import Home
from trn.gateway.answers import Encoded, TooManyError
from trn.gateway.daemon_link import DaemonLink
from trn.gateway.gate.credentials import Credentials
from trn.gateway.reading.exactness import ExactnessReader
from trn.gateway.reading.stores import Stores

MAX_PER_HOLDER, MAX_STREAMS = 64, 512


class StreamPlaces:
    """How many streams each holder has."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def take(self, holder: str) -> None:
        if self._open[holder] >= MAX_PER_HOLDER or self._open.total() >= MAX_STREAMS:
            raise TooManyError(
                f"{self._open[holder]} streams are open for this login and {self._open.total()} in all; the limits are"
                f" {MAX_PER_HOLDER} and {MAX_STREAMS}: close some"
            )
        self._open[holder] += 1

    def leave(self, holder: str) -> None:
        self._open[holder] -= 1
        if not self._open[holder]:
            del self._open[holder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    home: Home
    url: str  # without a path
    started_ms: int
    credentials: Credentials
    stores: Stores
    daemon: DaemonLink
    exactness: ExactnessReader
    openapi: Encoded
    streams: StreamPlaces = field(default_factory=StreamPlaces)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # streams end
