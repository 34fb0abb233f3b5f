"""A faulty time, on purpose: real runs on a real daemon while everything that can fail is made to fail.

Seeded: the same seed asks for the same runs and deals the same faults; when they strike is the machine's affair, and
that is the point. What the faults are: `fault_strikes`. What must be true afterwards: `fault_checker`.
`python tests/integration/fault_harness.py --help` runs it by hand.
"""

import argparse
import asyncio
import contextlib
import datetime
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from daemon_keeper import DaemonKeeper
from daemon_process import DEADLINE_S, end_everything
from fault_checker import History, Report, check
from fault_strikes import SHARES, FaultStrikes
from faulty_bus import FaultyBus
from lossy_socket import LossySocket
from moved_clock import MovedClock
from small_disk import SmallDisk

from gen_worker.contract.failpoints import BUS, ORCHESTRATOR
from trn.client.client import AsyncClient
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.registry.metrics import find_behind
from trn.registry.reader import RegistryReader

TRAINERS = Path(__file__).parent / "trainers"
SETTINGS = """
heartbeat_timeout_s = 4
start_timeout_s = 60
kill_patience_s = 2
sweep_s = 1
maintenance_s = 2
backfill_patience_s = 5
min_free_bytes = 1000000
[inventory]
cpus = 4
devices = [{id = "cuda:0"}, {id = "cuda:1"}, {id = "cuda:2"}]
"""
DISK_BYTES = 64 << 20  # and for each run:
DISK_BYTES_PER_RUN = 1 << 20
MAX_FLOODED_STEPS = 6
MAX_IN_FLIGHT = 12  # while faults strike
MIN_IN_FLIGHT = 4  # so that there is always something to strike
NUM_DEAF_WATCHERS = 5
# Each client that asks by the bus blocks one until it is answered. Who starts Redis again needs one, too.
NUM_THREADS = 4 * MAX_IN_FLIGHT
LOOK_EVERY_S = 0.05
LONG_RUNS, LONG_KILLS = 1000, 500
# Counted by what clients and daemons do, not dealt.
OTHER_KINDS = (
    "reply lost after the commit",
    "the same submit again",
    "two daemons at once",
    "flood of output",
    "watcher that never reads",
    "process that leaves its worker",
)


class FaultHarness:
    """`run` asks for runs, lets faults strike, waits for the calm, and checks.

    At least `num_runs`, spread over all faults; more where these have not all struck by then.
    """

    def __init__(
        self, folder: Path, *, num_runs: int, num_faults: int, seed: int, min_kills: int = 0
    ) -> None:
        self.folder = folder
        # Until the last kill there are more runs than were asked for.
        size_bytes = DISK_BYTES + (num_runs + 4 * min_kills) * DISK_BYTES_PER_RUN
        self.disk = SmallDisk(folder / "disk", size_bytes=size_bytes)
        self.home = Home(folder / "disk" / "home")
        self.witness = folder / "witness"
        self.witness.mkdir(parents=True)
        self.num_runs = num_runs
        self.num_faults = num_faults
        self.min_kills = min_kills
        self.seed = seed
        self.history = History()
        self.bus = FaultyBus()
        self.struck: Counter[str] = Counter()

    async def run(self) -> Report:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS))
        try:
            clock = MovedClock(self.folder / "clock")
            keeper = DaemonKeeper(
                self.home,
                disk=self.disk,
                clock=clock.path,
                settings=self.bus.settings + SETTINGS,
                struck=self.struck,
                dice=random.Random(f"{self.seed}/daemons"),
                failpoints=self._failpoints,
            )
            self.strikes = FaultStrikes(
                self.home,
                keeper,
                disk=self.disk,
                clock=clock,
                history=self.history,
                struck=self.struck,
                dice=random.Random(f"{self.seed}/faults"),
                diary=self.folder / "faults.txt",
                bus=self.bus,
            )
            try:
                await self._be_faulty(keeper)
                report = self._check(keeper)
            finally:
                end_everything(self.home.root)
                self.strikes.end()
        except BaseException:
            self._keep_home()
            raise
        else:
            if report.faults:
                self._keep_home()
            return report
        finally:
            self.bus.end()
            self.disk.unmount()

    async def _be_faulty(self, keeper: DaemonKeeper) -> None:
        async with asyncio.timeout(600 + self.num_runs * 10), asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(keeper.keep()),
                tasks.create_task(self._look_at_states()),
                tasks.create_task(self._never_read()),
            ]
            chaos = tasks.create_task(self.strikes.strike(self.num_faults, min_kills=self.min_kills))
            async with asyncio.TaskGroup() as clients:
                number = 0
                while number < self.num_runs or not chaos.done():
                    if chaos.done() or self._is_turn(number):
                        clients.create_task(self._ask(number))
                        number += 1
                    else:
                        await asyncio.sleep(LOOK_EVERY_S)
                keeper.is_calm = True
            for task in background:
                task.cancel()
        await self.bus.calm()
        keeper.end()
        if not self._is_caught_up():  # points that the full disk held up, events that Redis did
            await keeper.serve_until(self._is_caught_up)

    def _is_caught_up(self) -> bool:
        is_behind = find_behind(self.home.registry, self.home.metrics)
        return not is_behind and self.bus.is_caught_up(self.home)

    @property
    def _failpoints(self) -> list[str]:
        return [*ORCHESTRATOR, *([] if self.bus.problem else BUS)]

    def _check(self, keeper: DaemonKeeper) -> Report:
        report = check(self.home, self.history, self.witness)
        self.bus.check(self.home, report)
        report.faults += keeper.faults
        kinds = [*SHARES, *OTHER_KINDS, *(f"daemon killed at {name}" for name in self._failpoints)]
        for name in [*kinds, *sorted(set(self.struck) - set(kinds))]:
            report.struck[name] = self.struck[name]
        report.left_out |= self.strikes.left_out
        return report

    def _keep_home(self) -> None:
        """For whoever wants to know what happened: the disk goes with its mount."""
        if not self.disk.problem:
            ignore = shutil.ignore_patterns("*.sock")
            shutil.copytree(self.home.root, self.folder / "home", ignore=ignore, dirs_exist_ok=True)

    # Clients

    def _config(self, number: int, dice: random.Random) -> dict[str, Any]:
        options: dict[str, Any] = {"witness": str(self.witness), "step_ms": dice.choice([0, 5, 20, 100])}
        num_batches = dice.randint(3, 30)
        kind = dice.random()
        if kind < 0.10:
            options["fail_at"] = dice.randint(1, 10)
        elif kind < 0.25:
            options["die_at"] = dice.randint(1, 10)
        elif kind < 0.35:
            options["flood_bytes"] = dice.choice([1 << 16, 1 << 20])
            num_batches = min(num_batches, MAX_FLOODED_STEPS)
        elif kind < 0.40:
            options["is_deaf"] = True
        elif kind < 0.50:
            options["leaves"] = True
        resources: dict[str, Any] = {"devices": ["cpu"]}
        if dice.random() < 0.6:
            resources = {"gpus": dice.choice([1, 1, 1, 2, 3])}
        return {
            "name": f"submit-{number}",
            "trainer": "witnessed:Witnessed",
            "mock_batches": list(range(num_batches)),
            "metric_every": 1,
            "checkpoint_every": dice.choice([0, 3]),
            "hyperparams": options,
            "resources": resources,
            # More than a run can be killed here without a new checkpoint: that one ends is for the tests of retries.
            "retry": {"max_attempts": 1000, "backoff_s": 0.05},
            "heartbeat_s": 0.3,
            "grace_s": 2.0,
        }

    async def _ask(self, number: int) -> None:
        """One client, with a connection of its own: submits (twice, now and then), watches to the end."""
        dice = random.Random(f"{self.seed}/client {number}")
        config = self._config(number, dice)
        self.history.ask(config)
        self.struck["flood of output"] += "flood_bytes" in config["hyperparams"]
        self.struck["process that leaves its worker"] += "leaves" in config["hyperparams"]
        async with contextlib.AsyncExitStack() as stack:
            root = self.home.root
            if number % 4 == 1:
                lossy = self._lossy_socket(config["name"], num_lost=1 + number // 4 % 2)
                root = (await stack.enter_async_context(lossy)).home.root
            client = await stack.enter_async_context(AsyncClient(root, patience_s=DEADLINE_S))

            def submit() -> Awaitable[Any]:
                return client.submit(config, base_dir=TRAINERS, submission_id=config["name"])

            is_by_bus = number % 4 == 3 and not self.bus.problem
            if is_by_bus:
                run_id = await self.bus.submit(config, TRAINERS)
                self.struck["submit by the bus"] += 1
            else:
                run_id = (await self._insist(submit)).run.run_id
            self.history.acknowledged[config["name"]] = run_id
            if not is_by_bus and dice.random() < 0.3:
                again = await self._insist(submit)
                assert again.run.run_id == run_id
                self.struck["the same submit again"] += 1
            if dice.random() < 0.15:
                await asyncio.sleep(dice.random())
                self.history.cancelled.add(run_id)
                if is_by_bus:
                    await self.bus.cancel(run_id)
                else:
                    await self._insist(lambda: client.cancel(run_id, "the harness wants it"))
            lines: list[bytes] = []
            async for batch in client.event_lines(run_id):
                lines += batch.splitlines()
            run = await self._insist(lambda: client.wait(run_id))
            self.history.events[run_id] = lines
            self.history.saw(run_id, run.state, run.change)

    def _is_turn(self, number: int) -> bool:
        """Whether another run is asked for now: no sooner than its share of the faults has struck, if there is enough
        to strike without it.
        """
        num_in_flight = number - len(self.history.events)
        is_due = number * self.num_faults <= self.strikes.num_struck * self.num_runs
        return num_in_flight < (MAX_IN_FLIGHT if is_due else MIN_IN_FLIGHT)

    def _lossy_socket(self, name: str, *, num_lost: int) -> LossySocket:
        def note() -> None:
            with contextlib.closing(RegistryReader(self.home.registry)) as registry:
                is_committed = any(run.name == name for run in registry.page(name=name))
            self.struck["reply lost after the commit" if is_committed else "refusal lost"] += 1

        return LossySocket(self.folder / "lossy" / name, self.home, num_lost=num_lost, on_lost=note)

    @staticmethod
    async def _insist(call: Callable[[], Awaitable[Any]]) -> Any:
        """As a person would: once more, until it is answered."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return await call()
            except TrnError as fault:
                if fault.code != "unavailable" or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _look_at_states(self) -> None:
        """Whatever the registry ever says of a run that ended stays so."""
        async with AsyncClient(self.home.root, patience_s=DEADLINE_S) as client:
            newest = 0
            async for run in client.watch():
                self.history.saw(run.run_id, run.state, run.change)
                if run.change < newest:
                    self.history.changed_after_end.append(f"{run.run_id}: change {run.change} after {newest}")
                newest = run.change

    async def _never_read(self) -> None:
        """Watchers that take one message and then nothing any more."""
        async with contextlib.AsyncExitStack() as stack:
            watches = []
            for _ in range(NUM_DEAF_WATCHERS):
                client = await stack.enter_async_context(AsyncClient(self.home.root, patience_s=DEADLINE_S))
                watch = client.watch()
                await anext(watch)
                watches.append(watch)
                self.struck["watcher that never reads"] += 1
            await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, help="at least that many runs (default 300)")
    parser.add_argument("--faults", type=int, help="at least that many faults (default 300)")
    parser.add_argument(
        "--long", action="store_true", help=f"at least {LONG_KILLS} kills of daemons and of workers"
    )
    parser.add_argument(
        "--report", type=Path, help="also write what was done and found to this file, as Markdown"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    usual = LONG_RUNS if options.long else 300
    num_runs, num_faults = options.runs or usual, options.faults or usual
    print(f"{num_runs} runs, {num_faults} faults, seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="trn-soak-"))
    began = time.monotonic()
    harness = FaultHarness(
        folder,
        num_runs=num_runs,
        num_faults=num_faults,
        seed=options.seed,
        min_kills=LONG_KILLS if options.long else 0,
    )
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
        "# Soak report\n\n"
        f"Written by `make soak-long` on {date}: seed {seed}, {took_s / 60:.0f} minutes. Real runs on a real daemon; each"
        " fault below hit them while they ran. [Promises](promises.md) says what was checked.\n\n"
        f"```text\n{report}\n```\n"
    )


if __name__ == "__main__":
    sys.exit(main())
