"""The gateway of a home (the page and the HTTP API): find the one that runs, start one, stop it.

`gateway.json` is its owner's alone: it holds the bearer that programs send.
"""

import contextlib
import json
import os
import signal
import socket
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from gen_worker.contract.files.regular import read_regular
from gen_worker.contract.process_identity import ProcessIdentity
from trn.client.background_start import Program, ensure_running
from trn.core.errors import UnavailableError
from trn.core.home import Home

START_LOCK_NAME = "gateway-start.lock"
MAX_INFO_BYTES = 1 << 16
ASK_TIMEOUT_S = 10.0
STOP_PATIENCE_S = 30.0
LOOK_EVERY_S = 0.02


class RunningGateway(NamedTuple):
    """A gateway that listens, from its `gateway.json`. Its repr does not show the bearer."""

    process: ProcessIdentity
    url: str  # without a path
    bearer: str
    version: str
    address: str  # host:port that it is bound to
    certificate: str = ""  # by which its answers are verified, where it has TLS

    @property
    def pid(self) -> int:
        return self.process.pid

    def __repr__(self) -> str:
        return f"RunningGateway(pid={self.pid}, url={self.url!r})"

    def draw_login(self) -> str:
        """A URL that logs a browser in: once, within a few minutes. UnavailableError."""
        import http.client

        host, port = _place(self.address)
        try:
            if self.url.startswith("https:"):
                import ssl

                context = ssl.create_default_context(cafile=self.certificate or None)
                context.check_hostname = False  # its own certificate is trusted, and we know the address
                link = http.client.HTTPSConnection(host, port, timeout=ASK_TIMEOUT_S, context=context)
            else:
                link = http.client.HTTPConnection(host, port, timeout=ASK_TIMEOUT_S)  # type: ignore[assignment]
            with contextlib.closing(link):
                headers = {
                    "Host": urlsplit(self.url).netloc,
                    "Authorization": f"Bearer {self.bearer}",
                    "Content-Type": "application/json",
                }
                link.request("POST", "/api/v1/login-tokens", body=b"{}", headers=headers)
                answer = link.getresponse()
                said = answer.read(MAX_INFO_BYTES)
            return str(json.loads(said)["url"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as fault:
            raise UnavailableError(
                f"the gateway, pid {self.pid}, does not answer at {self.url}: {fault}; `trn ui --stop`, then `trn ui`"
            ) from fault


def find_gateway(home: Home) -> RunningGateway | None:
    """The home's gateway, if it listens now. The file of a dead one is ignored."""
    try:
        said = json.loads(read_regular(home.gateway_info, MAX_INFO_BYTES))
        found = RunningGateway(
            process=ProcessIdentity.of(said["process"]),
            url=str(said["url"]),
            bearer=str(said["bearer"]),
            version=str(said["version"]),
            address=str(said["address"]),
            certificate=str(said.get("certificate", "")),
        )
        return found if found.process.is_alive() and _listens(found.address) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def ensure_gateway(home: Home, *, address: str = "") -> tuple[RunningGateway, bool]:
    """(the home's gateway, whether it was started here). Blocks until it answers. UnavailableError, with its own message.

    `address` is host:port; empty: that of the settings, else a free port of loopback.
    """
    program = Program(
        name="gateway",
        module="trn.gateway",
        arguments=["--quiet", *(["--address", address] if address else [])],
        find=lambda: find_gateway(home),
        output=home.gateway_output,
        lock=home.root / START_LOCK_NAME,
        log=home.gateway_log,
        variables={},
    )
    return ensure_running(program, home)


def stop_gateway(gateway: RunningGateway, home: Home) -> None:
    """Blocks until its process has ended. UnavailableError."""
    try:
        os.kill(gateway.pid, signal.SIGTERM)
        os.kill(gateway.pid, signal.SIGCONT)  # a suspended process gets SIGTERM only after this
    except ProcessLookupError:
        return
    except PermissionError as fault:
        raise UnavailableError(
            f"no permission to stop the gateway, pid {gateway.pid}: it belongs to another user"
        ) from fault
    deadline = time.monotonic() + STOP_PATIENCE_S
    while gateway.process.is_alive():
        if time.monotonic() >= deadline:
            raise UnavailableError(
                f"the gateway, pid {gateway.pid}, has not stopped after {STOP_PATIENCE_S:g} s: see {home.gateway_log};"
                f" `kill -9 {gateway.pid}` is safe"
            )
        time.sleep(LOOK_EVERY_S)


def _listens(address: str) -> bool:
    try:
        socket.create_connection(_place(address), timeout=1.0).close()
    except OSError:
        return False
    return True


def _place(address: str) -> tuple[str, int]:
    """Where a gateway that is bound to that address is reached from this machine."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)  # noqa: S104
