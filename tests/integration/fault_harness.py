"""A faulty time, on purpose: real runs on a real daemon while everything that can be killed is killed.

Seeded: the same seed asks for the same runs and chooses the same faults; when they strike is the machine's affair, and
that is the point. `python tests/integration/fault_harness.py --help` runs it by hand.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from fault_checker import History, Report, check

from daemon_process import DEADLINE_S, DaemonProcess, end_everything
from gen_worker.failpoints import ORCHESTRATOR
from gen_worker.trainer.lease import is_process_alive
from trn.client.client import AsyncClient
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.registry.reader import RegistryReader

TRAINERS = Path(__file__).parent / "trainers"
SETTINGS = """
heartbeat_timeout_s = 4
start_timeout_s = 60
kill_patience_s = 2
sweep_s = 1
maintenance_s = 2
backfill_patience_s = 5
[inventory]
cpus = 4
devices = [{id = "cuda:0"}, {id = "cuda:1"}, {id = "cuda:2"}]
"""


class FaultHarness:
    """`run` asks for runs, lets faults strike, waits for the calm, and checks."""

    def __init__(self, folder: Path, *, num_runs: int, num_faults: int, seed: int) -> None:
        self.home = Home(folder / "home")
        self.witness = folder / "witness"
        self.witness.mkdir(parents=True)
        self.num_runs = num_runs
        self.num_faults = num_faults
        self.random = random.Random(seed)
        self.history = History()
        self.struck: Counter[str] = Counter()
        self.daemon = DaemonProcess(self.home.root, settings=SETTINGS)
        self._is_calm = False

    async def run(self) -> Report:
        self.daemon.wait_ready()
        try:
            async with asyncio.timeout(600 + self.num_runs * 10), asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._keep_a_daemon()),
                    tasks.create_task(self._look_at_states()),
                    tasks.create_task(self._never_read()),
                ]
                clients = [tasks.create_task(self._ask(number)) for number in range(self.num_runs)]
                chaos = tasks.create_task(self._strike())
                await asyncio.wait(clients)
                await chaos
                for task in background:
                    task.cancel()
            return self._check()
        finally:
            end_everything(self.home.root)

    def _check(self) -> Report:
        if self.daemon.is_running():
            self.daemon.stop()
        report = check(self.home, self.history, self.witness)
        for name, number in sorted(self.struck.items()):
            report.counts[f"fault: {name}"] = number
        return report

    # Clients

    def _config(self, number: int) -> dict[str, Any]:
        dice = self.random
        options: dict[str, Any] = {"witness": str(self.witness), "step_ms": dice.choice([0, 5, 20, 100])}
        kind = dice.random()
        if kind < 0.10:
            options["fail_at"] = dice.randint(1, 10)
        elif kind < 0.25:
            options["die_at"] = dice.randint(1, 10)
        elif kind < 0.35:
            options["flood_bytes"] = dice.choice([1 << 16, 1 << 20])
        elif kind < 0.40:
            options["is_deaf"] = True
        resources: dict[str, Any] = {"devices": ["cpu"]}
        if dice.random() < 0.6:
            resources = {"gpus": dice.choice([1, 1, 1, 2, 3])}
        return {
            "name": f"submit-{number}",
            "trainer": "witnessed:Witnessed",
            "mock_batches": list(range(dice.randint(3, 30))),
            "metric_every": 1,
            "checkpoint_every": dice.choice([0, 3]),
            "hyperparams": options,
            "resources": resources,
            "retry": {"max_attempts": 20, "backoff_s": 0.05},
            "heartbeat_s": 0.3,
            "grace_s": 2.0,
        }

    async def _ask(self, number: int) -> None:
        """One client, with a connection of its own: submits (twice, now and then), watches to the end."""
        config, dice = self._config(number), random.Random(self.random.random())
        await asyncio.sleep(dice.random() * self.num_runs / 10)
        self.history.asked.add(config["name"])
        async with AsyncClient(self.home.root, patience_s=DEADLINE_S) as client:
            submission = await self._insist(lambda: client.submit(config, base_dir=TRAINERS))
            run_id = submission.run.run_id
            self.history.acknowledged[config["name"]] = run_id
            if dice.random() < 0.3:
                again = await self._insist(lambda: client.submit(config, base_dir=TRAINERS))
                assert again.existed
                assert again.run.run_id == run_id
            if dice.random() < 0.15:
                await asyncio.sleep(dice.random())
                await self._insist(lambda: client.cancel(run_id, "the harness wants it"))
                self.history.cancelled.add(run_id)
            lines: list[bytes] = []
            async for batch in client.event_lines(run_id):
                lines += batch.splitlines()
            self.history.events[run_id] = lines
            run = await self._insist(lambda: client.wait(run_id))
            self.history.saw(run_id, run.state)

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
            async for run in client.watch():
                self.history.saw(run.run_id, run.state)

    async def _never_read(self) -> None:
        """Watchers that take one message and then nothing any more."""
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for _ in range(5):
                client = await stack.enter_async_context(AsyncClient(self.home.root, patience_s=DEADLINE_S))
                watch = client.watch()
                await anext(watch)
                clients.append(watch)
            await asyncio.Event().wait()

    # Faults

    async def _keep_a_daemon(self) -> None:
        """When it dies, another comes; sometimes two at once, of which one must give way."""
        while True:
            if not self.daemon.is_running():
                self.struck["daemon ended"] += 1
                failpoint = "" if self._is_calm else self._failpoint()
                candidates = [DaemonProcess(self.home.root, failpoints=failpoint)]
                if self.random.random() < 0.3:
                    self.struck["two daemons at once"] += 1
                    candidates.append(DaemonProcess(self.home.root))
                self.daemon = await self._first_to_serve(candidates)
            await asyncio.sleep(0.02)

    def _failpoint(self) -> str:
        if self.random.random() < 0.4:
            return ""
        name = self.random.choice(ORCHESTRATOR)
        self.struck[f"daemon killed at {name}"] += 1
        return f"{name}=kill@{self.random.choice([1, 1, 2, 3, 5, 10, 30])}"

    @staticmethod
    async def _first_to_serve(candidates: list[DaemonProcess]) -> DaemonProcess:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for one in candidates:
                others = [other for other in candidates if other is not one]
                if one.is_running() and not any(other.is_running() for other in others):
                    return one
            if not any(one.is_running() for one in candidates):
                return candidates[0]  # all were killed at their failpoints: the caller tries again
            await asyncio.sleep(0.02)
        raise AssertionError("two daemons of one home live on")

    async def _strike(self) -> None:
        faults: list[tuple[str, Callable[[], bool]]] = [
            ("daemon killed", self._kill_daemon),
            ("daemon stopped and continued", self._pause_daemon),
            ("worker killed", lambda: self._signal_worker(signal.SIGKILL)),
            ("worker killed", lambda: self._signal_worker(signal.SIGKILL)),
            ("worker stopped for ever", lambda: self._signal_worker(signal.SIGSTOP)),
            ("worker terminated by a stranger", lambda: self._signal_worker(signal.SIGTERM)),
            ("launcher killed", self._kill_launcher),
        ]
        weights = [6, 1, 3, 3, 2, 2, 1]
        num_struck = 0
        while num_struck < self.num_faults and len(self.history.events) < self.num_runs:
            await asyncio.sleep(self.random.random() * 0.6)
            name, strike = self.random.choices(faults, weights)[0]
            if strike():
                num_struck += 1
                self.struck[name] += 1
        self._is_calm = True

    def _kill_daemon(self) -> bool:
        if self.daemon.is_running():
            self.daemon.process.kill()
        return True

    def _pause_daemon(self) -> bool:
        process = self.daemon.process
        process.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(
            1.0, lambda: process.poll() is None and process.send_signal(signal.SIGCONT)
        )
        return True

    def _signal_worker(self, number: int) -> bool:
        with contextlib.closing(RegistryReader(self.home.registry)) as registry:
            workers = [
                attempt
                for run in registry.live()
                for attempt in registry.attempts(run.run_id)
                if attempt.ended_ms is None and attempt.pid
            ]
        if not workers:
            return False
        victim = self.random.choice(workers)
        if not is_process_alive(victim.pid, victim.start_ticks):
            return False
        os.kill(victim.pid, number)
        return True

    def _kill_launcher(self) -> bool:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                is_launcher = "gen_worker.launcher" in command and str(self.home.launcher) in command
                if is_launcher and not _is_worker(process):
                    process.kill()
                    return True
        return False


def _is_worker(process: psutil.Process) -> bool:
    """A forked worker has its launcher's command line, but is the child of one."""
    parent = process.parent()
    return parent is not None and "gen_worker.launcher" in parent.cmdline()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"{options.runs} runs, {options.faults} faults, seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="trn-soak-"))
    began = time.monotonic()
    harness = FaultHarness(folder, num_runs=options.runs, num_faults=options.faults, seed=options.seed)
    report = asyncio.run(harness.run())
    print(report)
    print(f"{time.monotonic() - began:.0f} s; everything is in {folder}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
