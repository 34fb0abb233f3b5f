"""The daemon, as the gateway sees it: calls and streams through the client, and whether it is there."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from trn.client.client import AsyncClient
from trn.client.daemon_start import find_daemon
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.version import VERSION
from trn.proto.records import Health

logger = logging.getLogger("trn.gateway")

CALL_PATIENCE_S = 3.0  # for a daemon that is just being restarted
FOR_EVER_S = 1e9
HEALTH_TIMEOUT_S = 3.0
LOOK_EVERY_S = 0.5
HEALTH_FRESH_S = 1.0


class GatewayHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon: `up`, `silent` (it does not answer) or `down`, with what it says of itself; and the gateway."""

    daemon: str
    home: str
    gateway_version: str
    gateway_started_ms: int
    daemon_version: str = ""
    daemon_started_ms: int = 0
    warnings: tuple[str, ...] = ()
    runs_by_state: dict[str, int] = {}
    launcher: str = ""
    num_watchers: int = 0


class DaemonLink:
    """Belongs to the loop's thread. `run` looks after the daemon until it was stopped on purpose."""

    def __init__(self, home: Home, started_ms: int) -> None:
        self._home = home
        self._started_ms = started_ms
        self.calls = AsyncClient(home.root, patience_s=CALL_PATIENCE_S)
        self.streams = AsyncClient(home.root, patience_s=FOR_EVER_S)  # they continue when a daemon is back
        self._health = AsyncClient(home.root, patience_s=0, timeout_s=HEALTH_TIMEOUT_S)
        self._asking = asyncio.Lock()
        self._asked_at = 0.0
        self._said: GatewayHealth | None = None

    async def close(self) -> None:
        for client in (self.calls, self.streams, self._health):
            await client.close()

    async def recent_health(self) -> GatewayHealth:
        """As `health`, asked once for all who want it within a second."""
        async with self._asking:
            if time.monotonic() - self._asked_at > HEALTH_FRESH_S or self._said is None:
                self._said = await self.health()
                self._asked_at = time.monotonic()
            return self._said

    async def health(self) -> GatewayHealth:
        """Also while there is no daemon."""
        daemon = await asyncio.to_thread(find_daemon, self._home)
        said: Health | None = None
        if daemon is not None:
            with contextlib.suppress(TrnError):
                said = await self._health.health()
        own = GatewayHealth(
            daemon="down" if daemon is None else "silent",
            home=str(self._home.root),
            gateway_version=VERSION,
            gateway_started_ms=self._started_ms,
        )
        if said is None:
            return own
        return msgspec.structs.replace(
            own,
            daemon="up",
            daemon_version=said.version,
            daemon_started_ms=said.started_ms,
            warnings=said.warnings,
            runs_by_state=said.runs_by_state,
            launcher=said.launcher,
            num_watchers=said.num_watchers,
        )

    async def run(self, stop: Callable[[str], None]) -> None:
        """Calls `stop` once a daemon that was there has been stopped. One that was killed leaves its file."""
        was_there = False
        while True:
            is_there = self._home.daemon_info.exists()
            if was_there and not is_there and await asyncio.to_thread(find_daemon, self._home) is None:
                stop("the daemon was stopped")
                return
            was_there = was_there or is_there
            await asyncio.sleep(LOOK_EVERY_S)
