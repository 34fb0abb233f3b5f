"""Events through the outbox into a real Redis, beside the same entries by redis-py's own pipeline, without an outbox.

Each side has a server of its own, on a socket in its folder, which keeps an append-only file as one that matters would.
"""

import atexit
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from harness import Prepare, Round, Sample, serve
from trn.core.bus_url import read_bus_url
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL
from trn.daemon.outlets.bus_publisher import BusPublisher
from trn.daemon.outlets.outbox import Outbox
from trn.daemon.outlets.redis_streams import MAX_LENGTH, PREFIX, RedisBus
from trn.executors.local.files import LocalFiles
from trn.executors.pools import Pools
from trn.registry.base import NewRun
from trn.registry.sqlite import RunRegistry

START_PATIENCE_S = 20.0
PIPELINE = 1000  # commands at a time
EVENTS = f"{PREFIX}:events"


class Server:
    """A Redis of this side's own; it ends with the interpreter."""

    def __init__(self, home: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("there is no redis-server: apt-get install redis-server")
        home.mkdir(parents=True, exist_ok=True)
        self._sockets = tempfile.TemporaryDirectory(prefix="trn-bench-")  # short: a socket's path must be
        self.socket = f"{self._sockets.name}/redis.sock"
        command = [program, "--port", "0", "--unixsocket", self.socket, "--dir", str(home), "--save", ""]
        output = subprocess.DEVNULL
        self._process = subprocess.Popen([*command, "--appendonly", "yes"], stdout=output, stderr=output)
        atexit.register(self._end)
        self.client = redis.Redis(unix_socket_path=self.socket)
        deadline = time.monotonic() + START_PATIENCE_S
        while time.monotonic() < deadline:
            try:
                self.client.ping()
            except redis.ConnectionError:
                time.sleep(0.01)
            else:
                return
        raise RuntimeError("redis-server does not answer")

    def num_events(self) -> int:
        """How many were ever added, also those that Redis has dropped since."""
        if not self.client.exists(EVENTS):
            return 0
        found: dict[str, Any] = self.client.xinfo_stream(EVENTS)  # type: ignore[assignment]
        return int(found["entries-added"])

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._sockets.cleanup()


def make_event(run_id: str, seq: int) -> dict[str, Any]:
    """As a worker writes one."""
    head = {
        "schema_version": "trainer_event.v1",
        "event": "metric",
        "seq": seq,
        "run_id": run_id,
        "attempt": 1,
    }
    return {
        **head,
        "timestamp_ms": 1_700_000_000_000 + seq,
        "name": "train/loss",
        "value": 0.123456,
        "step": seq,
    }


def outbox(options: Mapping[str, Any]) -> Round:
    """Runs that live, whose new events the registry has taken in: until Redis has them all and the outbox knows it."""
    home = Home(Path(options["home"]))
    home.make()
    server = Server(home.root / "redis")
    registry = RunRegistry(home.registry)
    bus = RedisBus(read_bus_url(f"unix://{server.socket}"), reader="bench")
    publisher = BusPublisher(
        outbox=Outbox(registry, Pools({LOCAL_POOL: LocalFiles(home)}), "bus"), bus=bus, shown="the bench's"
    )
    run_ids = [f"run-{number}" for number in range(options["num_runs"])]
    num_each = options["num_events"] // len(run_ids)
    for run_id in run_ids:
        registry.submit(NewRun(run_id=run_id, digest=run_id, config={})).result()
        registry.claim(run_id, []).result()
        home.run(run_id).events.parent.mkdir(parents=True)
    publisher.publish_changes()
    last_seq = 0

    def take_in() -> None:
        for run_id in run_ids:
            lines = [json.dumps(make_event(run_id, last_seq + 1 + number)) for number in range(num_each)]
            path = home.run(run_id).events
            with path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
            place = {"offset": path.stat().st_size, "last_seq": last_seq + num_each}
            registry.follow(run_id, 1, **place, step=0, heartbeat_ms=0, metrics={}).result()

    def publish() -> Sample:
        nonlocal last_seq
        take_in()
        last_seq += num_each
        num_before = server.num_events()
        start, cpu = time.perf_counter(), time.thread_time()
        publisher.publish_changes()
        publisher.commit()
        registry.set_slots([]).result()  # committed after all that was handed in before it
        seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
        num_events = server.num_events() - num_before
        if num_events != num_each * len(run_ids):
            raise RuntimeError(f"{num_events} of {num_each * len(run_ids)} events were published")
        return {"events_per_s": num_events / seconds, "cpu_us": 1e6 * cpu_s / num_events}

    return publish


def pipelined(options: Mapping[str, Any]) -> Round:
    """XADD by redis-py's pipeline, of entries that lie ready."""
    server = Server(Path(options["home"]) / "redis")
    num_events = options["num_events"]
    entries: list[dict[Any, Any]] = [
        {"run_id": "run-0", "seq": seq, "event": "metric", "data": json.dumps(make_event("run-0", seq))}
        for seq in range(1, num_events + 1)
    ]

    def publish() -> Sample:
        start, cpu = time.perf_counter(), time.thread_time()
        for first in range(0, num_events, PIPELINE):
            pipe = server.client.pipeline(transaction=False)
            for entry in entries[first : first + PIPELINE]:
                pipe.xadd(EVENTS, entry, maxlen=MAX_LENGTH)
            pipe.execute()
        seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
        return {"events_per_s": num_events / seconds, "cpu_us": 1e6 * cpu_s / num_events}

    return publish


SIDES: dict[str, Prepare] = {"outbox": outbox, "pipelined": pipelined}

if __name__ == "__main__":
    serve(SIDES)
