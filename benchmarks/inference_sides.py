"""The sides of the topic `inference`: each starts its server in an interpreter of its own, and loads it round by round."""

import atexit
import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Round, Sample, SideError, serve
from inference_load import DELAY_S, Load, Server, free_port, running
from inference_server import BEARER

LEAVING = 100  # clients
LEAVE_AFTER_S = 0.3
ANSWER_S = 60.0
_kept = contextlib.ExitStack()
atexit.register(_kept.close)


def _keep(command: list[str], port: int = 0) -> Server:
    """A server that lives as long as this interpreter."""
    return _kept.enter_context(running(command, port=port))


def _ours(options: Mapping[str, Any]) -> Server:
    return _keep(["inference_server.py", options["version"], str(options.get("replicas", 1))])


def _peer(name: str) -> Server:
    port = free_port()
    return _keep(["inference_peers.py", name, str(port)], port)


def _litserve(**options: Any) -> Server:
    port = free_port()
    return _keep(["inference_litserve.py", str(port), json.dumps(options)], port)


def _loaded(server: Server, load: Load) -> Round:
    """Warmed up before the first round."""
    replace(load, seconds=1.0).run(server)
    return lambda: load.run(server)


def front(options: Mapping[str, Any]) -> Round:
    server = _ours(options)
    load = Load(path="/v1/predict", bearer=BEARER, **options["load"])
    return _loaded(server, load)


def hello(options: Mapping[str, Any]) -> Round:
    return _loaded(_peer("hello"), Load(path="/", **options["load"]))


def litserve(options: Mapping[str, Any]) -> Round:
    return _loaded(_litserve(is_batched=options["is_batched"]), Load(**options["load"]))


def fastapi(options: Mapping[str, Any]) -> Round:
    return _loaded(_peer("fastapi"), Load(**options["load"]))


def litserve_start(_options: Mapping[str, Any]) -> Round:
    def start() -> Sample:
        begun = time.monotonic()
        port = free_port()
        command = ["inference_litserve.py", str(port), json.dumps({"is_batched": True})]
        with running(command, port=port):
            return {"ms": 1000 * (time.monotonic() - begun)}

    return start


# Memory: of a server that has answered and then rests. It ends with the round: two that run share the pages of torch.


def front_memory(options: Mapping[str, Any]) -> Round:
    load = Load(path="/v1/predict", bearer=BEARER, **options["load"])

    def rest() -> Sample:
        with running(["inference_server.py", options["version"], "1"]) as server:
            load.run(server)
            return {"memory_mb": server.memory_mb()}

    return rest


def bare_memory(_options: Mapping[str, Any]) -> Round:
    def rest() -> Sample:
        with running(["inference_peers.py", "bare", "0"]) as server:
            return {"memory_mb": server.memory_mb()}

    return rest


# Clients that leave: how long the next one waits, in batches.


def _request(path: str, body: bytes, bearer: str = "") -> bytes:
    authorization = f"Authorization: Bearer {bearer}\r\n" if bearer else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{authorization}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _wait_after_leaving(server: Server, request: bytes) -> Sample:
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(LEAVING)]
    for client in clients:
        client.sendall(request)
    time.sleep(LEAVE_AFTER_S)
    for client in clients:
        client.close()
    with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_S) as next_one:
        begun = time.monotonic()
        next_one.sendall(request)
        if not next_one.recv(65536).startswith(b"HTTP/1.1 200"):
            raise SideError("the next client got no answer")
        waited_s = time.monotonic() - begun
    time.sleep(1.0)  # what is still computed for nobody is not this round's any more
    return {"wait_batches": waited_s / DELAY_S, "wait_ms": 1000 * waited_s}


def front_left(options: Mapping[str, Any]) -> Round:
    server = _ours(options)
    request = _request("/v1/predict", Path(options["body"]).read_bytes(), BEARER)
    return lambda: _wait_after_leaving(server, request)


def litserve_left(options: Mapping[str, Any]) -> Round:
    server = _litserve(is_batched=False, delay_s=DELAY_S)
    request = _request("/predict", Path(options["body"]).read_bytes())
    return lambda: _wait_after_leaving(server, request)


# A model worker that is killed under load.


def front_killed(options: Mapping[str, Any]) -> Round:
    server = _ours({**options, "replicas": 2})
    load = Load(path="/v1/predict", bearer=BEARER, **options["load"])
    load.run(server)

    def kill() -> Sample:
        wrk = load.start(server)
        time.sleep(load.seconds / 3 + random.random() * load.seconds / 3)
        server.process.send_signal(signal.SIGUSR1)
        gone_ms = server.read_line()["gone_ms"]
        return {"failed": load.finish(wrk)["failed"], "gone_ms": gone_ms}

    return kill


SIDES: dict[str, Callable[[Mapping[str, Any]], Round]] = {
    "front": front,
    "hello": hello,
    "litserve": litserve,
    "fastapi": fastapi,
    "litserve_start": litserve_start,
    "front_memory": front_memory,
    "bare_memory": bare_memory,
    "front_left": front_left,
    "litserve_left": litserve_left,
    "front_killed": front_killed,
}

if __name__ == "__main__":
    serve(SIDES)
