"""A real gateway beside a real daemon, and the HTTP requests of tests: as they are, byte for byte where that matters."""

import http.client
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from daemon_process import DEADLINE_S, DaemonProcess, end_everything

from trn.client.gateway_start import RunningGateway, ensure_gateway, find_gateway
from trn.core.home import Home

TRN = str(Path(sys.executable).with_name("trn"))
SETTINGS = """
min_free_bytes = 1000000
sweep_s = 0.2
[inventory]
cpus = 4
devices = []
"""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class GatewayWorld:
    """A home with a daemon (for runs that need no torch) and a gateway. A context: it ends all that it started."""

    def __init__(self, home: Path, *, settings: str = SETTINGS) -> None:
        self.home = Home(home)
        self.daemon = DaemonProcess(home, settings=settings, is_bare=True)
        try:
            self.daemon.wait_ready()
            self.gateway = self.start_gateway()
        except BaseException:
            end_everything(home)
            raise

    def __enter__(self) -> "GatewayWorld":
        return self

    def __exit__(self, *_exception: object) -> None:
        end_everything(self.home.root)

    def start_gateway(self) -> RunningGateway:
        self.gateway, _ = ensure_gateway(self.home)
        return self.gateway

    @property
    def host(self) -> str:
        return self.gateway.url.removeprefix("http://")

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.gateway.bearer}"}

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """With exactly these headers; a body that is no bytes is sent as JSON."""
        link = http.client.HTTPConnection(self.host, timeout=DEADLINE_S)
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        try:
            link.request(method, path, body=body, headers=sent)
            answer = link.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            link.close()

    def get(self, path: str, **headers: str) -> Answer:
        """As a program does it."""
        return self.ask("GET", f"/api/v1{path}", headers={**self.bearer, **headers})

    def send(self, method: str, path: str, body: Any = None) -> Answer:
        headers = {**self.bearer, "Content-Type": "application/json"}
        return self.ask(method, f"/api/v1{path}", {} if body is None else body, headers)

    def log_in(self) -> dict[str, str]:
        """The headers of a browser that has logged in."""
        token = self.send("POST", "/login-tokens").data["token"]
        own = {"Origin": self.gateway.url, "Content-Type": "application/json"}
        answer = self.ask("POST", "/api/v1/login", {"token": token}, own)
        assert answer.status == 204, answer
        return {**own, "Cookie": answer.headers["set-cookie"].partition(";")[0]}

    def is_gateway_running(self) -> bool:
        return find_gateway(self.home) is not None


class EventReader:
    """The messages of one stream, read by one thread."""

    def __init__(self, world: GatewayWorld, query: str, **headers: str) -> None:
        self._link = http.client.HTTPConnection(world.host, timeout=DEADLINE_S)
        self._link.request("GET", f"/api/v1/stream?{query}", headers={**world.bearer, **headers})
        self.answer = self._link.getresponse()
        self.last_id = ""

    def __enter__(self) -> "EventReader":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.answer.close()
        self._link.close()

    def next(self, *events: str) -> tuple[str, Any]:
        """(event, data) of the next message; the next of these events, where some are given."""
        event, data = "", ""
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "event":
                event = value
            elif name == "id":
                self.last_id = value
            elif name == "data":
                data = value
            elif not line.strip():
                if event and (not events or event in events):
                    return event, json.loads(data)
                event = data = ""
