"""The faults that strike a model server and its daemon, and the operator who changes what it answers with meanwhile."""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from daemon_keeper import DaemonKeeper, Deck
from daemon_process import DEADLINE_S
from fault_strikes import find_launcher, send
from moved_clock import MovedClock
from serving_checker import ServerEnd, Times
from serving_clients import Record

from gen_worker.contract.process_identity import (
    ProcessIdentity,
    boot_id,
    is_process_alive,
    list_pids,
    read_process,
)
from gen_worker.contract.serving import WANTED
from trn.client.client import AsyncClient
from trn.core.errors import ConflictError, TrnError
from trn.core.home import Home
from trn.core.serving.records import Promotion
from trn.registry.reader import RegistryReader

LOOK_EVERY_S = 0.02
PAUSE_S = 0.8
LIFE_S = 30.0
SHARES = {
    "model worker killed": 4,
    "model worker stopped and continued": 1,
    "template of a version killed": 1,
    "model parent killed": 1,
    "server killed": 2,
    "daemon killed": 3,
    "launcher killed": 1,
    "odd files in the server's folder": 1,
}
NAME, TRAINED = "soak", "good"
METRIC = "val/loss"
# What the operator asks for: action, model, gate. Each of the second list must be refused.
FIRST_STEP, LAST_STEP, SLOW_STEP = 2, 7, 8
GOOD = [f"{TRAINED}@{step}" for step in range(FIRST_STEP, LAST_STEP + 1)]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (f"{TRAINED}@1", {"metric": METRIC}),  # the first step has the worst loss
    (f"{TRAINED}@{SLOW_STEP}", {"max_latency_ms": 1e-6}),
    ("raise", {}),
    ("exit", {}),
    ("columns", {}),
]


class ServingStrikes:
    """`strike` deals one fault after the other, `operate` one promotion after the other."""

    def __init__(
        self,
        home: Home,
        run_id: str,
        keeper: DaemonKeeper,
        *,
        record: Record,
        times: Times,
        tasks: asyncio.TaskGroup,
        struck: Counter[str],
        clock: MovedClock,
        seed: int,
        diary: Path,
    ) -> None:
        self._home = home
        self._run_id = run_id
        self._keeper = keeper
        self._record = record
        self._times = times
        self._tasks = tasks
        self._struck = struck
        self._clock = clock
        self._dice = random.Random(f"{seed}/faults")
        self._wishes = random.Random(f"{seed}/operator")
        self._deck = Deck([name for name, share in SHARES.items() for _ in range(share)], self._dice)
        self._diary = diary
        self._began = time.monotonic()
        self.num_struck = 0

    async def strike(self, num_faults: int, seconds: float) -> None:
        """At least so many faults, and at least for so long."""
        acts: dict[str, Callable[[], Awaitable[bool]]] = {
            "model worker killed": lambda: self._signal_model(signal.SIGKILL, is_worker=True),
            "model worker stopped and continued": lambda: self._signal_model(signal.SIGSTOP, is_worker=True),
            "template of a version killed": lambda: self._signal_model(signal.SIGKILL, is_worker=False),
            "model parent killed": self._kill_model_parent,
            "server killed": self._kill_server,
            "daemon killed": self._kill_daemon,
            "launcher killed": self._kill_launcher,
            "odd files in the server's folder": self._place_odd_files,
        }
        while self.num_struck < num_faults or time.monotonic() < self._began + seconds:
            await asyncio.sleep(self._dice.random() * 2 * PAUSE_S)
            name = self._deck.deal()
            while True:
                if await acts[name]():
                    break
                await asyncio.sleep(LOOK_EVERY_S)  # no victim yet
            self._struck[name] += 1
            self.num_struck += 1
            self._note(name)

    async def watch_processes(self) -> None:
        """Whatever the server starts is known at the end. Until cancelled."""
        while True:
            self.note_processes()
            await asyncio.sleep(0.2)

    def note_processes(self) -> list[int]:
        """The pids that live, of the server first; empty while there is none."""
        server = self._find_server()
        if server is None:
            return []
        pids = [server, *_descendants(server)]
        for pid in pids:
            with contextlib.suppress(OSError):
                state = read_process(pid)
                if state is not None:
                    self._times.processes.add(ProcessIdentity(boot_id(), pid, state.start_ticks))
        return pids

    # The operator.

    async def operate(self, client: AsyncClient, is_over: Callable[[], bool]) -> None:
        """Promotions, rollbacks, a second version beside, and what must be refused."""
        cards = ["promote"] * 6 + ["refused"] * 4 + ["rollback"] * 2 + ["split", "shadow"]
        deck = Deck(cards, self._wishes)
        refused = Deck(REFUSED, self._wishes)
        models = Deck(GOOD, self._wishes)
        number = 0
        while not is_over():
            number += 1
            card = deck.deal()
            asked: dict[str, Any] = {"promotion_id": f"p{number}"}
            model = models.deal()
            if card == "refused":
                model, gate = refused.deal()
                asked["gate"] = gate
            elif card == "split":
                asked |= {"action": "split", "percent": 30.0}
            elif card == "shadow":
                asked["action"] = "shadow"

            def ask(
                card: str = card, model: str = model, asked: dict[str, Any] = asked
            ) -> Awaitable[Promotion]:
                if card == "rollback":
                    return client.rollback(NAME, **asked)
                return client.promote(NAME, model, **asked)

            try:
                made = await insist(ask)
            except ConflictError:  # it answers with that one already, or has none to go back to
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            ended = await insist(lambda made=made: client.wait_promotion(made))
            self._struck[f"{card}: {ended.state}"] += 1
            self._note(f"{card} {model} {ended.number}: {ended.state} {ended.cause} {ended.words}")
            if card == "refused" and ended.state != "refused":
                self._record.stuck.append(f"{model} was to be refused, and is {ended.state}")
            await asyncio.sleep(self._wishes.random() * 0.2)

    # Processes.

    async def _signal_model(self, number: int, *, is_worker: bool) -> bool:
        """Of a model worker that has answered, or of a process beside it that has not: a template, as a rule."""
        parent = self._find_model_parent()
        children = [] if parent is None else _children()[parent]
        victims = [pid for pid in children if (pid in self._record.worker_pids) == is_worker]
        if not victims:
            return False
        victim = self._dice.choice(victims)
        if number == signal.SIGSTOP:
            asyncio.get_running_loop().call_later(PAUSE_S, send, victim, signal.SIGCONT)
        return send(victim, number)

    async def _kill_model_parent(self) -> bool:
        parent = self._find_model_parent()
        return parent is not None and self._end_server(parent)

    async def _kill_server(self) -> bool:
        server = self._find_server()
        return server is not None and self._end_server(server)

    def _end_server(self, pid: int) -> bool:
        """By a kill of that process. False while it does not answer: that it starts is waited for."""
        if any(end.ended >= self._record.last_answered_at for end in self._times.ends):
            return False
        processes = self.note_processes()
        if not processes:
            return False
        self._clock.move(
            LIFE_S
        )  # one that falls soon after its start, again and again, waits before the next
        end = ServerEnd(began=time.monotonic())
        self._times.ends.append(end)
        self._tasks.create_task(self._await_end(processes[0], end))
        return send(pid, signal.SIGKILL)

    @staticmethod
    async def _await_end(server: int, end: ServerEnd) -> None:
        while True:
            if not is_process_alive(server):
                break
            await asyncio.sleep(LOOK_EVERY_S)
        end.ended = time.monotonic()

    async def _kill_daemon(self) -> bool:
        return self._keeper.kill()

    async def _kill_launcher(self) -> bool:
        launcher = find_launcher(self._home)
        return launcher is not None and send(launcher, signal.SIGKILL)

    # Files that are not what they were.

    async def _place_odd_files(self) -> bool:
        """A folder where a leftover of a killed process could be, and a FIFO in the place of what is wanted: for the next start."""
        folder = self._home.run(self._run_id).serving
        if not folder.is_dir():
            return False
        leftover = folder / f".live.json.{self.num_struck}-ab.tmp"
        leftover.mkdir(exist_ok=True)
        (leftover / "kept").touch()
        (folder / WANTED).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # the daemon was quicker
            os.mkfifo(folder / WANTED)
        return True

    def _find_server(self) -> int | None:
        """The process of the attempt that lives."""
        try:
            with contextlib.closing(RegistryReader(self._home.registry)) as registry:
                attempts = registry.attempts(self._run_id)
        except (TrnError, sqlite3.Error):
            return None
        if not attempts or attempts[-1].ended_ms is not None or not attempts[-1].worker:
            return None
        process = ProcessIdentity.of(attempts[-1].worker)
        return process.pid if process.is_alive() else None

    def _find_model_parent(self) -> int | None:
        """The child of the server that has the model processes."""
        server = self._find_server()
        children = _children()
        return next((pid for pid in children.get(server, ()) if children.get(pid)), None) if server else None

    def _note(self, text: str) -> None:
        with self._diary.open("a") as diary:
            print(f"{time.monotonic() - self._began:8.2f} s  {text}", file=diary)


async def insist(call: Callable[[], Awaitable[Any]]) -> Any:
    """As a person would: once more, until it is answered."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return await call()
        except TrnError as fault:
            if fault.code != "unavailable" or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def _children() -> dict[int, list[int]]:
    """Of every process."""
    found: dict[int, list[int]] = defaultdict(list)
    for pid in list_pids():
        with contextlib.suppress(OSError):
            state = read_process(pid)
            if state is not None and not state.is_ended:
                found[state.parent].append(pid)
    return found


def _descendants(pid: int) -> list[int]:
    children = _children()
    found = [*children[pid]]
    for each in found:  # grows
        found += children[each]
    return found
