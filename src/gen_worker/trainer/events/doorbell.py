"""A datagram for whoever follows a run's events."""

import contextlib
import socket


class Doorbell:
    """Tells whoever follows a run's events that there are new ones. Whether anyone hears it makes no difference."""

    def __init__(self, address: str, run_id: str) -> None:
        self._address = address
        self._message = run_id.encode()
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        except (OSError, AttributeError):
            self.close()

    def ring(self) -> None:
        if self._socket is not None:
            # By its name each time: the one who listens may have come back meanwhile.
            with contextlib.suppress(OSError, ValueError):
                self._socket.sendto(self._message, self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
