"""A faulty time for a model server, on purpose: a real daemon, a real server, versions that change, clients of all kinds.

Seeded: the same seed asks for the same requests and promotions and deals the same faults; when they strike is the
machine's affair. What strikes: `serving_strikes`. Who asks: `serving_clients`. What must be true: `serving_checker`.
`python tests/integration/serving_harness.py --help` runs it by hand.
"""

import argparse
import asyncio
import datetime
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from daemon_keeper import DaemonKeeper
from daemon_process import DEADLINE_S, end_everything
from fault_checker import Report
from fault_harness import TRAINERS
from moved_clock import MovedClock
from served_front import Client
from serving_checker import Times, check
from serving_clients import MAX_BATCH_ROWS, MAX_QUEUE_ROWS, Clients, Record
from serving_strikes import LAST_STEP, NAME, SHARES, SLOW_STEP, TRAINED, ServingStrikes, insist
from worker_process import write_rows

from gen_worker.contract.failpoints import ORCHESTRATOR, SERVING
from gen_worker.contract.serving import read_live
from trn.client.client import AsyncClient
from trn.core.home import Home
from trn.core.serving.records import Promotion

SETTINGS = """
heartbeat_timeout_s = 20
start_timeout_s = 120
kill_patience_s = 2
sweep_s = 1
[inventory]
cpus = 16
"""
FAILPOINTS = [
    name for name in (*ORCHESTRATOR, *SERVING) if name.startswith(("registry.", "ingest.", "promotion."))
]
NUM_REPLICAS = 2
LOOK_EVERY_S = 0.05
LONG_S = 600.0
NEVER = {"raise", "exit", "columns"}  # runs whose versions no gate lets through


class ServingHarness:
    """`run` trains versions, serves one, lets faults strike, waits for the calm, and checks."""

    def __init__(self, folder: Path, *, num_faults: int, seed: int, seconds: float = 0.0) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.num_faults = num_faults
        self.seconds = seconds
        self.seed = seed
        self.record = Record()
        self.times = Times()
        self.struck: Counter[str] = Counter()
        self.faults: list[str] = []

    async def run(self) -> Report:
        self.clock = MovedClock(self.folder / "clock")
        keeper = DaemonKeeper(
            self.home,
            clock=self.clock.path,
            settings=SETTINGS,
            struck=self.struck,
            dice=random.Random(f"{self.seed}/daemons"),
            failpoints=FAILPOINTS,
        )
        try:
            async with AsyncClient(self.home.root, patience_s=DEADLINE_S) as client:
                checkpoints = await self._train(client)
                run_id = await self._serve(client)
                await self._be_faulty(client, keeper, run_id)
                promotions = await self._end(client, keeper, run_id)
            report = await asyncio.to_thread(
                check, self.record, self.times, self.home.run(run_id).events, checkpoints, promotions
            )
        finally:
            end_everything(self.home.root)
        report.faults += [*self.faults, *keeper.faults]
        for name in [*SHARES, *sorted(set(self.struck) - set(SHARES))]:
            report.struck[name] = self.struck[name]
        return report

    async def _train(self, client: AsyncClient) -> dict[str, Path]:
        """Label -> checkpoint, of every version that could be served."""
        data = {"parquet_paths": [str(write_rows(self.folder / "train.parquet"))], "batch_size": 20}

        async def train(name: str, num_steps: int, **hyperparams: Any) -> None:
            job = {
                "run_id": name,
                "trainer": "soaked:Soaked",
                "max_steps": num_steps,
                "checkpoint_every": 1,
                "validate_every": 1,
                "checkpoints": {"keep_last": 0},
                "dataset": data,
                "validation": {"dataset": data},
                "hyperparams": hyperparams,
                "resources": {"devices": ["cpu"]},
            }
            await client.submit(job, base_dir=TRAINERS)
            ended = await client.wait(name)
            assert ended.state == "COMPLETED", ended.reason

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(train(TRAINED, SLOW_STEP))
            for name in sorted(NEVER):
                tasks.create_task(train(name, 1, fault=name))
        found = {}
        for name, last in {TRAINED: SLOW_STEP, **dict.fromkeys(NEVER, 1)}.items():
            for step in range(1, last + 1):
                found[f"{name}@{step}"] = self.home.run(name).checkpoints / f"step-{step:08d}.meta.json"
        self.times.never = {f"{TRAINED}@1", f"{TRAINED}@{SLOW_STEP}", *(f"{name}@1" for name in NEVER)}
        return found

    async def _serve(self, client: AsyncClient) -> str:
        job = {
            "mode": "inference",
            "name": NAME,
            "serving": {
                "checkpoint": f"{TRAINED}@{LAST_STEP}",
                "replicas": NUM_REPLICAS,
                "max_batch_rows": MAX_BATCH_ROWS,
                "max_queue_rows": MAX_QUEUE_ROWS,
            },
            "resources": {"devices": ["cpu"]},
            # More often than a server would be started again: that it is given up at last is for other tests.
            "retry": {"max_attempts": 1000, "backoff_s": 0.05},
            "heartbeat_s": 0.5,
            "grace_s": 30.0,
        }
        run_id = (await client.submit(job)).run.run_id
        async for run in client.watch(run_ids=[run_id]):
            assert run.state not in ("FAILED", "CANCELLED"), run.reason
            if (await client.get_served(NAME)).served.is_ready:
                break
        return run_id

    async def _be_faulty(self, client: AsyncClient, keeper: DaemonKeeper, run_id: str) -> None:
        is_over = asyncio.Event()
        clients = Clients(
            self.home.run(run_id).serving, seed=self.seed, record=self.record, is_over=is_over.is_set
        )
        async with asyncio.timeout(600 + 2 * self.seconds), asyncio.TaskGroup() as tasks:
            strikes = self.strikes = ServingStrikes(
                self.home,
                run_id,
                keeper,
                record=self.record,
                times=self.times,
                tasks=tasks,
                struck=self.struck,
                clock=self.clock,
                seed=self.seed,
                diary=self.folder / "faults.txt",
            )
            keeping = tasks.create_task(keeper.keep())
            watching = tasks.create_task(strikes.watch_processes())
            failing = tasks.create_task(self._fail_if_ended(client, run_id))
            calls = [
                tasks.create_task(clients.run()),
                tasks.create_task(strikes.operate(client, is_over.is_set)),
            ]
            await strikes.strike(self.num_faults, self.seconds)
            keeper.is_calm = True
            last = time.monotonic()
            while True:
                if self.record.last_answered_at > last:  # whatever struck last: it answers again
                    break
                await asyncio.sleep(LOOK_EVERY_S)
            is_over.set()
            await asyncio.gather(*calls)
            for task in (keeping, watching, failing):
                task.cancel()

    @staticmethod
    async def _fail_if_ended(client: AsyncClient, run_id: str) -> None:
        """Whatever strikes, a server is started again."""
        run = await insist(lambda: client.wait(run_id))
        raise AssertionError(f"the server ended as {run.state}: {run.reason}")

    async def _end(self, client: AsyncClient, keeper: DaemonKeeper, run_id: str) -> list[Promotion]:
        """What a calm server says of itself, and that a cancel leaves nothing of it."""
        await keeper.calm()
        served = await insist(lambda: client.get_served(NAME, limit=100_000))
        live = read_live(self.home.run(run_id).serving)
        assert live is not None
        if served.served.live != live.version.facts:
            self.faults.append(f"live.json has {live.version.label}, the registry {served.served.live}")
        await self._ask_calm(live.url, run_id)
        self.strikes.note_processes()
        await insist(lambda: client.cancel(run_id, "the soak is over"))
        ended = await insist(lambda: client.wait(run_id))
        if ended.state != "CANCELLED":
            self.faults.append(f"the server ended as {ended.state}: {ended.reason}")
        keeper.end()
        return list(served.promotions)

    async def _ask_calm(self, url: str, run_id: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        bearer = (self.home.run(run_id).serving / "bearer").read_text().strip()
        asking = Client(*await asyncio.open_connection(host, int(port)))
        try:
            reply = await asking.ask("GET", "/metrics", authorization=f"Bearer {bearer}")
        finally:
            await asking.close()
        waiting = [line for line in reply.body.decode().splitlines() if line.startswith("trn_queue_rows")]
        if not waiting or any(float(line.rpartition(" ")[2]) for line in waiting):
            self.faults.append(f"rows wait, and nobody asks: {waiting}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="for at least so long (default 120)")
    parser.add_argument("--faults", type=int, default=30, help="at least that many faults (default 30)")
    parser.add_argument("--long", action="store_true", help=f"{LONG_S / 60:.0f} minutes")
    parser.add_argument(
        "--report", type=Path, help="also write what was done and found to this file, as Markdown"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    seconds = options.seconds if options.seconds is not None else LONG_S if options.long else 120.0
    print(f"{seconds:.0f} s, seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="trn-soak-"))
    began = time.monotonic()
    harness = ServingHarness(folder, num_faults=options.faults, seed=options.seed, seconds=seconds)
    report = asyncio.run(harness.run())
    took_s = time.monotonic() - began
    print(report)
    print(f"{took_s:.0f} s; everything is in {folder}")
    if options.report:
        options.report.write_text(_as_page(report, seed=options.seed, took_s=took_s), encoding="utf-8")
    return 1 if report.faults else 0


def _as_page(report: Report, *, seed: int, took_s: float) -> str:
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        "# Soak report of serving\n\n"
        f"Written by `make soak-serving` on {date}: seed {seed}, {took_s / 60:.0f} minutes. A real daemon, a real model"
        " server and clients of all kinds; each fault below hit them while they worked. [Promises](promises.md#what-the-serving-soak-does)"
        " says what was checked.\n\n"
        f"```text\n{report}\n```\n"
    )


if __name__ == "__main__":
    sys.exit(main())
