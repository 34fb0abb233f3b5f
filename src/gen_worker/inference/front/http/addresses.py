"""Where a front listens: HOST:PORT on the loopback, or unix:PATH. Another host needs TLS."""

import errno
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from gen_worker.errors import StartupError

UNIX = "unix:"
BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`path` of a Unix socket, or host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_address(text: str) -> Address:
    """StartupError where it is neither."""
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        if not path:
            raise StartupError(f"address is {text!r}, expected {UNIX}PATH")
        return Address(path=Path(path))
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise StartupError(f"address is {text!r}, expected HOST:PORT or {UNIX}PATH")
    return Address(host=host, port=int(port))


def bind(address: Address) -> socket.socket:
    """A listening socket. Only this user can connect to a Unix socket. StartupError where it cannot be used."""
    try:
        return _bind_path(address.path) if address.path is not None else _bind_port(address)
    except OSError as fault:
        where = f"{UNIX}{address.path}" if address.path is not None else f"{address.host}:{address.port}"
        raise StartupError(f"{where} cannot be used: {fault.strerror or fault}") from fault


def _bind_port(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With its protocol named, the loop sends small answers at once (TCP_NODELAY); else each may wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_path(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        # A socket's file gets the permissions of its descriptor: there is no moment when others can connect.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    """The socket of a server that ended. Anything else, and a socket where somebody answers, is left alone."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is a file of that name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another process listens there")
