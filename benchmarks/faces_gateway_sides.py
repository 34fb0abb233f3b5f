"""The gateway without a browser: its start and memory, what it costs the daemon, how fast it lists runs."""

import asyncio
import atexit
import contextlib
import http.client
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from daemon_session import DEADLINE_S, ONE_CPU, POLL_S, Daemon, end_everything
from faces_data import OURS, Sizes, prepare
from harness import Prepare, Round, Sample
from trn.client.gateway_start import RunningGateway, ensure_gateway, find_gateway
from trn.core.home import Home

MB = 1e6
REST_S = 1.0


def start(options: Mapping[str, Any]) -> Round:
    """From its spawn to its first answer, beside a daemon that runs; then what it holds, after a page was open."""
    daemon = Daemon(prepare(OURS, "table", Sizes(**options["sizes"])))
    atexit.register(daemon.close)
    daemon.wait_announced()
    home = daemon.home

    def spawn() -> Sample:
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trn.gateway", "--home", str(home.root), "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            gateway = _wait_for(home, process)
            _ask(gateway, "/api/v1/health")
            serving_s = time.monotonic() - begun
            for path in ("/", "/api/v1/runs", "/api/v1/health"):
                _ask(gateway, path)
            with _following(gateway):
                time.sleep(REST_S)
            time.sleep(REST_S)
            return {"s": serving_s, "resident_mb": psutil.Process(process.pid).memory_info().rss / MB}
        finally:
            process.terminate()
            process.wait(DEADLINE_S)

    spawn()  # page cache
    return spawn


def _wait_for(home: Home, process: "subprocess.Popen[bytes]") -> RunningGateway:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = find_gateway(home)
        if found is not None and found.pid == process.pid:
            return found
        time.sleep(POLL_S)
    raise RuntimeError("the gateway does not serve")


def _headers(gateway: RunningGateway) -> dict[str, str]:
    return {"Authorization": f"Bearer {gateway.bearer}", "Accept-Encoding": "gzip"}


def _ask(gateway: RunningGateway, path: str) -> bytes:
    with contextlib.closing(_connect(gateway)) as link:
        link.request("GET", path, headers=_headers(gateway))
        answer = link.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"GET {path.partition('?')[0]} answers {answer.status}")
        return body


def _connect(gateway: RunningGateway) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(gateway.url).netloc, timeout=DEADLINE_S)


@contextlib.contextmanager
def _following(gateway: RunningGateway) -> Iterator[None]:
    """A reader of the stream, as an open page is one."""
    link = _connect(gateway)
    link.request("GET", "/api/v1/stream?watch=runs", headers=_headers(gateway))
    answer = link.getresponse()

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            while answer.read1(65536):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        assert link.sock is not None
        link.sock.shutdown(socket.SHUT_RDWR)
        reader.join(DEADLINE_S)
        link.close()


# --- the daemon beside it ------------------------------------------------------------------------------------------


def daemon_beside(options: Mapping[str, Any]) -> Round:
    """A daemon alone, and one with a gateway and an open page, which take turns: start, memory, how long a submit takes."""
    folder = Path(options["home"])
    numbers = itertools.count()
    atexit.register(end_everything, folder)

    def both() -> Sample:
        number = next(numbers)
        order = ["alone", "with"] if number % 2 else ["with", "alone"]
        with contextlib.ExitStack() as stack:
            daemons, starts = {}, {}
            for name in order:
                settings = ONE_CPU + ('[http]\naddress = "127.0.0.1:0"\n' if name == "with" else "")
                daemon = stack.enter_context(Daemon(folder / f"{number}-{name}", settings=settings))
                daemon.wait_announced()
                starts[name] = asyncio.run(_first_answer_s(daemon))
                daemons[name] = daemon
            gateway = ensure_gateway(daemons["with"].home)[0]
            with _following(gateway):
                submits = asyncio.run(_take_turns(daemons, options["num_submits"]))
                time.sleep(REST_S)
                resident = {
                    name: psutil.Process(it.process.pid).memory_info().rss for name, it in daemons.items()
                }
        return {
            "start_ratio": starts["with"] / starts["alone"],
            "submit_ratio": submits["with"] / submits["alone"],
            "resident_ratio": resident["with"] / resident["alone"],
            "submit_ms": submits["with"],
        }

    return both


async def _first_answer_s(daemon: Daemon) -> float:
    async with daemon.client() as client:
        await client.health()
        return time.monotonic() - daemon.started


async def _take_turns(daemons: Mapping[str, Daemon], num_submits: int) -> dict[str, float]:
    """The median of each, in ms; what is submitted stays in the queue."""
    taken_ms: dict[str, list[float]] = {name: [] for name in daemons}
    async with contextlib.AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(it.client()) for name, it in daemons.items()}
        for name, daemon in daemons.items():
            await daemon.hold(clients[name])
        for number in range(num_submits):
            for name in list(daemons)[:: 1 if number % 2 else -1]:
                job = daemons[name].job("daemon_trainers:Trivial", mock_batches=[1])
                begun = time.perf_counter()
                await daemons[name].submit(clients[name], job)
                taken_ms[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(taken) for name, taken in taken_ms.items()}


# --- lists ---------------------------------------------------------------------------------------------------------


def list_rate(options: Mapping[str, Any]) -> Round:
    """So many clients, each with a connection that it keeps, that ask for the first page of runs again and again."""
    daemon = Daemon(prepare(OURS, "list", Sizes(**options["sizes"])))
    atexit.register(daemon.close)
    daemon.wait_announced()
    gateway = ensure_gateway(daemon.home)[0]
    place = urlsplit(gateway.url)
    assert place.hostname is not None
    lines = [
        "GET /api/v1/runs?limit=100 HTTP/1.1",
        f"Host: {place.netloc}",
        *(f"{name}: {value}" for name, value in _headers(gateway).items()),
    ]
    request = ("\r\n".join(lines) + "\r\n\r\n").encode()
    if len(json.loads(_plain(gateway))["runs"]) != 100:
        raise RuntimeError("the page does not have 100 runs")

    def ask(stop: threading.Event, counts: list[int]) -> None:
        count = 0
        with socket.create_connection((place.hostname, place.port)) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not stop.is_set():
                link.sendall(request)
                _read_answer(link)
                count += 1
        counts.append(count)

    def run() -> Sample:
        stop, counts = threading.Event(), list[int]()
        threads = [threading.Thread(target=ask, args=(stop, counts)) for _ in range(options["num_clients"])]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(options["seconds"])
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
        if len(counts) != len(threads):
            raise RuntimeError("a client failed")
        return {"per_s": sum(counts) / (time.perf_counter() - begun)}

    run()
    return run


def _plain(gateway: RunningGateway) -> bytes:
    import gzip

    return gzip.decompress(_ask(gateway, "/api/v1/runs?limit=100"))


def _read_answer(link: socket.socket) -> None:
    """One whole answer with a content-length. RuntimeError where it is no 200."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(link)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.split(b"\r\n")[0].decode())
    name = b"content-length:"
    length = next(int(line[len(name) :]) for line in head.lower().split(b"\r\n") if line.startswith(name))
    left = length - len(body)
    while left > 0:
        left -= len(_receive(link))


def _receive(link: socket.socket) -> bytes:
    data = link.recv(1 << 18)
    if not data:
        raise RuntimeError("the gateway closed a connection")
    return data


SIDES: dict[str, Prepare] = {"start": start, "daemon_beside": daemon_beside, "list_rate": list_rate}
