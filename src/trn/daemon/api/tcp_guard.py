"""Connections from the network whose caller has not shown a token yet: few of them, and not for long.

gRPC accepts connections, makes TLS and reads requests by itself, and reports a connection only at its first call.
So the guard looks at this process's own descriptors: which of them are connections to our port, and which of those have
made a call with a valid token. Every other one is a stranger. A stranger is shut when its time is over; where there are
too many, the oldest are shut first. A newcomer is never refused for them, so a flood of idle connections does not keep
out a caller who shows a token at once.

Invariants: connections of callers with a token, and the socket of the home, are never touched. gRPC itself takes at most
a quarter of the descriptors for each of the two (`max_connections`), so that half of them are left for the daemon.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from urllib.parse import unquote

logger = logging.getLogger("trn.daemon.api.tcp_guard")

AUTHENTICATE_S = 10.0  # from the connection to the first call with a valid token
MAX_STRANGERS = 128
LOOK_EVERY_S = 0.5
SAY_EVERY_S = 60.0

Peer = tuple[str, int]


def max_connections(max_open_files: int) -> int:
    """What gRPC may take for each of its ports."""
    return max(max_open_files // 4, 16)


class TcpGuard:
    """`admit` and `run` belong to the loop's thread."""

    def __init__(
        self,
        port: int,
        *,
        authenticate_s: float = AUTHENTICATE_S,
        max_strangers: int = MAX_STRANGERS,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.port = port
        self.num_shut = 0
        self._authenticate_s = authenticate_s
        self._max_strangers = max_strangers
        self._look_every_s = look_every_s
        self._clock = clock
        self._known: set[Peer] = set()
        self._since: dict[Peer, float] = {}
        self._shut: set[Peer] = set()
        self._say_again_at = float("-inf")

    def admit(self, peer: str) -> None:
        """A call with a valid token came from there (`context.peer()`)."""
        named = read_peer(peer)
        if named is not None:
            self._known.add(named)

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except OSError as fault:  # no descriptors, say: gRPC's own limit holds meanwhile
                logger.warning("connections cannot be looked at: %s; trying again", fault)
            await asyncio.sleep(self._look_every_s)

    async def look(self) -> None:
        """Shut the strangers whose time is over, and the oldest of those that are too many."""
        known = set(self._known)
        found = await asyncio.to_thread(list_peers, self.port)
        self._known -= known - found
        now = self._clock()
        self._shut &= found  # gRPC lets go of them in a moment
        self._since = {peer: self._since.get(peer, now) for peer in found - self._known - self._shut}
        oldest_first = sorted(self._since, key=lambda peer: self._since[peer])
        too_many = len(oldest_first) - self._max_strangers
        over = {
            peer
            for index, peer in enumerate(oldest_first)
            if index < too_many or now - self._since[peer] >= self._authenticate_s
        }
        if over:
            await asyncio.to_thread(shut_peers, self.port, over)
            self._shut |= over
            self.num_shut += len(over)
            self._tell(len(over), now)

    def _tell(self, num_shut: int, now: float) -> None:
        if now >= self._say_again_at:
            self._say_again_at = now + SAY_EVERY_S
            logger.warning(
                "port %d: %d connections showed no token and were closed (%d since the start)",
                self.port,
                num_shut,
                self.num_shut,
            )


def read_peer(text: str) -> Peer | None:
    """What gRPC calls a peer (`ipv4:1.2.3.4:5`, `ipv6:%5B::1%5D:5`), as an address and a port; None for a socket."""
    kind, _, place = unquote(text).partition(":")
    host, _, port = place.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def list_peers(port: int) -> set[Peer]:
    """Who is connected to that port of this process. Blocks."""
    found: set[Peer] = set()
    _for_each(port, lambda _connection, peer: found.add(peer))
    return found


def shut_peers(port: int, peers: set[Peer]) -> None:
    """End these connections; gRPC finds them closed. Blocks."""

    def end(connection: socket.socket, peer: Peer) -> None:
        if peer in peers:
            connection.shutdown(socket.SHUT_RDWR)

    _for_each(port, end)


def _for_each(port: int, do: Callable[[socket.socket, Peer], object]) -> None:
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            # A descriptor of our own: the number may be another file's by now, and what counts is what it is.
            descriptor = os.dup(int(name))
        except OSError as fault:
            if fault.errno == errno.EBADF:  # closed since it was listed
                continue
            raise
        with socket.socket(fileno=descriptor) as connection:
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getsockname()[1] != port:
                    continue
                host, peer_port, *_ = connection.getpeername()
                do(connection, (_plain(host), peer_port))
            except OSError:  # it listens, or is closed already
                continue
