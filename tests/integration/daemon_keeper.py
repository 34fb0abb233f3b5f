"""Keeps a daemon of a home alive while faults strike: when it dies, another comes, sometimes two at once."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from daemon_process import DEADLINE_S, DaemonProcess
from small_disk import SmallDisk

from gen_worker.contract.failpoints import ORCHESTRATOR
from trn.core.errors import AlreadyRunningError
from trn.core.home import Home

LOOK_EVERY_S = 0.02
AROUND_A_COMMIT = tuple(name for name in ORCHESTRATOR if name.startswith("registry."))
REFUSED = (1, AlreadyRunningError.daemon_exit_code)  # of a daemon that did not start


T = TypeVar("T")


class Deck(Generic[T]):
    """Deals its cards in a random order, all of them before any comes again."""

    def __init__(self, cards: list[T], dice: random.Random) -> None:
        self._cards = cards
        self._dice = dice
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._dice.sample(self._cards, len(self._cards))
        return self._left.pop()


class DaemonKeeper:
    """`daemon` is the one that serves, or served last. Whoever holds `is_down` keeps another from being started."""

    def __init__(
        self,
        home: Home,
        *,
        disk: SmallDisk | None = None,
        clock: Path | None = None,
        settings: str,
        struck: Counter[str],
        dice: random.Random,
        failpoints: Sequence[str] = ORCHESTRATOR,
    ) -> None:
        self._home = home
        self._disk = disk
        self._clock = clock
        self._struck = struck
        self._failpoints = Deck([*failpoints, *[""] * (len(failpoints) // 2)], dice)
        self._times = Deck([1, 1, 2, 3, 5, 10, 30], dice)
        # Failpoints that come first. The second daemon dies for sure, around the first commit that it makes.
        self._owed = [dice.choice(AROUND_A_COMMIT)]
        self._is_twofold = Deck([True, False, False], dice)
        self._shot: DaemonProcess | None = None
        self._began_at = time.monotonic()
        self._had_rival = False
        self._has_died_at_failpoint = False
        self.is_down = asyncio.Lock()
        self.is_calm = False  # no more failpoints
        self.faults: list[str] = []
        self.daemon = DaemonProcess(home.root, settings=settings, clock=clock)
        self.daemon.wait_ready()

    def kill(self) -> bool:
        """As a power cut would; False where none runs, or the one that dies for sure has yet to."""
        if not self.daemon.is_running() or (self.daemon.failpoints and not self._has_died_at_failpoint):
            return False
        self._shot = self.daemon
        self.daemon.process.kill()
        return True

    def pause(self, pause_s: float) -> bool:
        process = self.daemon.process
        if not self.daemon.is_running():
            return False
        process.send_signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(
            pause_s, lambda: process.poll() is None and process.send_signal(signal.SIGCONT)
        )
        return True

    async def calm(self) -> None:
        """One serves that nothing kills any more: also no failpoint to which it has not come yet."""
        self.is_calm = True
        async with self.is_down:
            if self.daemon.is_running() and self.daemon.failpoints:
                self.daemon.process.kill()
                await asyncio.to_thread(self.daemon.process.wait)
            if not self.daemon.is_running():
                await self.replace()

    def end(self) -> None:
        """Stop it as an operator would."""
        if self.daemon.is_running() and (code := self.daemon.stop()) != 0:
            self.faults.append(f"a daemon that was stopped ended with {code}: see {self.daemon.log}")

    async def serve_until(self, is_so: Callable[[], bool]) -> None:
        """One more daemon, without faults, until then; where that never comes, the checker finds what is missing."""
        self.daemon = DaemonProcess(self._home.root, clock=self._clock)
        self.daemon.wait_ready()
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if is_so():
                break
            await asyncio.sleep(LOOK_EVERY_S)
        self.end()

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            async with self.is_down:
                if not self.daemon.is_running():
                    self._note_end(self.daemon, has_rival=self._had_rival)
                    await self.replace()
            await asyncio.sleep(LOOK_EVERY_S)

    def _note_end(self, daemon: DaemonProcess, *, has_rival: bool) -> None:
        """A daemon that ends though nobody killed it is a fault, unless it could not start."""
        code = daemon.process.returncode
        name = daemon.failpoints.partition("=")[0]
        if daemon is self._shot:  # who shot it has counted it
            self._owe(name)
            return
        if code in REFUSED:
            self._owe(name)
        if code == -signal.SIGKILL and name:
            self._has_died_at_failpoint = True
            self._struck[f"daemon killed at {name}"] += 1
        elif code in REFUSED and has_rival:  # even if that one was killed before we looked
            self._struck["daemon gave way to another"] += 1
        elif code in REFUSED and self._disk is not None and self._disk.full_until >= self._began_at:
            self._struck["daemon refused to start on a full disk"] += 1
        else:
            self.faults.append(f"a daemon ended by itself, with {code}: see {daemon.log}")

    def _owe(self, name: str) -> None:
        """It never came to that failpoint."""
        if name and name not in self._owed:
            self._owed.append(name)

    def _choose_failpoints(self) -> str:
        name, nth = "", 1
        if not self.is_calm:
            if self._owed:
                name = self._owed.pop(0)
            elif name := self._failpoints.deal():
                nth = self._times.deal()
        return f"{name}=kill@{nth}" if name else ""

    async def replace(self) -> None:
        failpoints = self._choose_failpoints()
        self._began_at = time.monotonic()
        candidates = [DaemonProcess(self._home.root, failpoints=failpoints, clock=self._clock)]
        if self._is_twofold.deal():
            self._struck["two daemons at once"] += 1
            candidates.append(DaemonProcess(self._home.root, clock=self._clock))
        self._had_rival = len(candidates) > 1
        self.daemon = await self._first_to_serve(candidates)
        for other in candidates:
            if other is not self.daemon:
                self._note_end(other, has_rival=True)

    @staticmethod
    async def _first_to_serve(candidates: list[DaemonProcess]) -> DaemonProcess:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            running = [one for one in candidates if one.is_running()]
            if len(running) < 2:
                return running[0] if running else candidates[0]
            await asyncio.sleep(LOOK_EVERY_S)
        raise AssertionError("two daemons of one home live on")
