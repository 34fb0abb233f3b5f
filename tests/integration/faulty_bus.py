"""The event bus of a faulty time: a real Redis that is killed, stopped, cut off and full while daemons are killed, too.

What must be true afterwards, whatever struck (`check_bus`):

- Every event of every run is in the stream, at least once, in order for each run, as it is in the run's file. What comes
  twice is the same.
- The last state that was told of a run is the one it ended in, and no other follows a final one.
- Every command was answered and is gone. Answers to the same command name the same run; a submit made one run.
"""

import asyncio
import contextlib
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis
from daemon_process import DEADLINE_S
from fault_checker import Report
from redis_server import RedisServer

from trn.core.home import Home
from trn.core.runs import TERMINAL
from trn.registry.reader import RegistryReader

SHARES = {
    "redis killed": 2,
    "redis and daemon killed": 1,
    "redis stopped and continued": 1,
    "redis connections cut": 1,
    "redis out of memory": 1,
}
LOOK_EVERY_S = 0.05
ANSWER_S = 10 * DEADLINE_S  # daemons and Redis are killed every few seconds
NEWEST = 400
EVENTS, RUNS, COMMANDS, REPLIES = "trn:events", "trn:runs", "trn:commands", "trn:replies"


class FaultyBus:
    """`server` is None where there is no Redis here; `problem` then says so."""

    def __init__(self) -> None:
        self.problem = ""
        self.server: RedisServer | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self.requests: dict[str, str] = {}  # request id -> what was asked
        self.is_away = False
        self._is_over = False
        if shutil.which("redis-server") is None:
            self.problem = "redis-server is not installed"
        else:
            self.server = RedisServer()
            self.server.start()

    @property
    def settings(self) -> str:
        return "" if self.server is None else f'event_bus = "{self.server.url}?maxlen=100000000"\n'

    def end(self) -> None:
        self._is_over = True
        if self.server is not None:
            self.server.__exit__(None, None, None)

    # Faults: False where another one is still under way

    async def kill(self, away_s: float) -> bool:
        if self.server is None or self.is_away:
            return False
        self.is_away = True
        self.server.kill()
        self._later(away_s, self.server.start)
        return True

    async def pause(self, away_s: float) -> bool:
        if self.server is None or self.is_away:
            return False
        self.is_away = True
        self.server.pause()
        self._later(away_s, self.server.go_on)
        return True

    async def cut_connections(self) -> bool:
        """Every connection that is open, in the middle of whatever it does."""
        if self.server is None or self.is_away:
            return False
        server = self.server
        for kind in ("normal", "pubsub"):
            with contextlib.suppress(redis.RedisError):  # our own is among them
                await asyncio.to_thread(server.client.execute_command, "CLIENT", "KILL", "TYPE", kind)
        return True

    async def fill(self, away_s: float) -> bool:
        """It takes nothing more."""
        if self.server is None or self.is_away:
            return False
        self.is_away = True
        server = self.server
        await asyncio.to_thread(server.client.config_set, "maxmemory", 1)
        self._later(away_s, lambda: server.client.config_set("maxmemory", 0))
        return True

    async def calm(self) -> None:
        while self._restarts:
            await asyncio.gather(*self._restarts)

    def _later(self, delay_s: float, act: Any) -> None:
        async def do() -> None:
            await asyncio.sleep(delay_s)
            await asyncio.to_thread(act)
            self.is_away = False

        task = asyncio.get_running_loop().create_task(do())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    # A program that asks by the bus

    async def submit(self, config: Mapping[str, Any], base_dir: Path) -> str:
        """The id of the run."""
        fields = {"command": "submit", "config": json.dumps(config), "base_dir": str(base_dir)}
        return (await self._insist(fields))["run_id"]

    async def cancel(self, run_id: str) -> None:
        await self._insist({"command": "cancel", "run_id": run_id, "reason": "the harness wants it"})

    async def _insist(self, fields: dict[str, str]) -> dict[str, str]:
        async with asyncio.timeout(ANSWER_S):
            while True:
                reply = await asyncio.to_thread(self._ask, fields)
                if reply["ok"] == "1":
                    return reply
                assert reply["code"] == "unavailable", reply  # the disk is full, say

    def _ask(self, fields: dict[str, str]) -> dict[str, str]:
        """Send a command once, and wait for the answer to it. Blocks."""
        assert self.server is not None
        request_id = uuid.uuid4().hex
        self.requests[request_id] = fields["command"]
        is_sent = False
        with contextlib.closing(self.server.connect()) as client:
            while not self._is_over:
                try:
                    if not is_sent:
                        # What Redis had taken before it was killed is there again; so look before sending it twice.
                        if not self._find(client, COMMANDS, request_id) and not self._find(
                            client, REPLIES, request_id
                        ):
                            client.xadd(COMMANDS, {**fields, "request_id": request_id})  # type: ignore[dict-item]
                        is_sent = True
                    if replies := self._find(client, REPLIES, request_id):
                        return replies[0]
                except redis.RedisError:
                    pass
                self.server.wait_a_moment()
        return {"ok": "0", "code": "unavailable"}

    @staticmethod
    def _find(client: "redis.Redis", stream: str, request_id: str) -> list[dict[str, str]]:
        found: Any = client.xrevrange(
            stream, count=NEWEST
        )  # a long soak has thousands, and each asker looks often
        entries = [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]
        return [entry for entry in entries if entry.get("request_id") == request_id]

    # Afterwards

    def is_caught_up(self, home: Home) -> bool:
        if self.server is None:
            return True
        report = Report()
        self.check(home, report)
        return not report.faults

    def check(self, home: Home, report: Report) -> None:
        """The promises of the bus, over all that is in Redis and in the home. The daemon may be up or down."""
        if self.server is None:
            report.counts["events on the bus"] = 0
            return
        with contextlib.closing(RegistryReader(home.registry)) as registry:
            runs = {run.run_id: run.state for run in _all_runs(registry)}
        self._check_events(home, list(runs), report)
        self._check_states(runs, report)
        self._check_commands(runs, report)

    def _check_events(self, home: Home, run_ids: list[str], report: Report) -> None:
        assert self.server is not None
        told: dict[str, list[str]] = {run_id: [] for run_id in run_ids}
        num_entries = 0
        for entry in self.server.entries(EVENTS):
            num_entries += 1
            run_id, seq = entry["run_id"], int(entry["seq"])
            lines = told.setdefault(run_id, [])
            if seq > len(lines) + 1:
                report.faults.append(f"bus: event {seq} of {run_id} comes after {len(lines)}")
            elif seq == len(lines) + 1:
                lines.append(entry["data"])
            elif lines[seq - 1] != entry["data"]:
                report.faults.append(f"bus: event {seq} of {run_id} came twice, and not the same")
        for run_id, lines in told.items():
            path = home.run(run_id).events
            wanted = path.read_text().splitlines() if path.exists() else []
            if lines != wanted:
                report.faults.append(f"bus: {len(lines)} events of {run_id}, its file has {len(wanted)}")
        num_told = sum(map(len, told.values()))
        report.counts["events on the bus"] = num_told
        report.counts["events on the bus that came again"] = num_entries - num_told

    def _check_states(self, runs: Mapping[str, str], report: Report) -> None:
        assert self.server is not None
        last: dict[str, str] = {}
        for entry in self.server.entries(RUNS):
            before = last.get(entry["run_id"])
            if before in TERMINAL and entry["state"] != before:
                report.faults.append(f"bus: {entry['run_id']} was {before}, then {entry['state']}")
            last[entry["run_id"]] = entry["state"]
        for run_id, state in runs.items():
            if last.get(run_id) != state:
                report.faults.append(
                    f"bus: {run_id} is {state}, the last that was told is {last.get(run_id)}"
                )

    def _check_commands(self, runs: Mapping[str, str], report: Report) -> None:
        assert self.server is not None
        answers: dict[str, set[str]] = {}
        num_answers: Counter[str] = Counter()
        for reply in self.server.entries(REPLIES):
            answers.setdefault(reply["request_id"], set()).add(reply.get("run_id", reply.get("code", "")))
            num_answers[reply["request_id"]] += 1
        report.counts["commands by the bus"] = len(self.requests)
        report.counts["answers by the bus that came again"] = sum(num_answers.values()) - len(num_answers)
        for request_id, command in self.requests.items():
            found = answers.get(request_id, set())
            if len(found) != 1:
                report.faults.append(
                    f"bus: {command} {request_id} has the answers {sorted(found)}, expected one"
                )
            elif command == "submit" and not found <= {*runs, "unavailable"}:
                report.faults.append(
                    f"bus: submit {request_id} was answered with {sorted(found)}, which is no run"
                )
        if left := self.server.client.xlen(COMMANDS):
            report.faults.append(f"bus: {left} commands are still there")


def _all_runs(registry: RegistryReader) -> list[Any]:
    runs: list[Any] = []
    before = None
    while page := registry.page(before=before, limit=500):
        runs += page
        before = (page[-1].submitted_ms, page[-1].run_id)
    return runs
