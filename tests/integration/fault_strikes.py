"""The faults of a faulty time. Each strikes real processes, a real disk, a real clock, while runs go on.

    daemon killed             kill -9, at a random moment (at every failpoint too: see `DaemonKeeper`)
    daemon stopped            SIGSTOP, and a second later SIGCONT
    worker killed, stopped, terminated        by a stranger, without a word to the daemon
    launcher killed           its workers go on without it
    launcher stopped          SIGSTOP, and a second later SIGCONT
    no descriptors            the daemon can open nothing more, for a second or so
    disk filled               a file takes the last byte of the home's disk, for a second or so
    clock moved               the daemon's wall clock, by minutes or hours
    pid reused                daemon, launcher and a worker are killed, and another process gets the worker's pid
    redis killed, stopped, cut off, out of memory        the event bus, alone or with the daemon: see `FaultyBus`
    power cut                 daemon, launcher and a worker are killed, and files that were not synced are empty
    record deleted            the attempt's record goes while no daemon is there, and its worker lives on
    checkpoint of another     a checkpoint that another run saved is put into a living run's folder

Which comes next is dealt from a deck: every kind strikes before any strikes again beyond its share. One that finds no
victim waits for it. Lost replies are the clients' affair: see `FaultHarness`.
"""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import faulty_bus
import msgspec
from daemon_keeper import DaemonKeeper, Deck
from fault_checker import History
from faulty_bus import FaultyBus
from moved_clock import MovedClock
from small_disk import SmallDisk

from gen_worker.contract.files.durable import replace_file
from gen_worker.contract.process_identity import ProcessIdentity, is_same_process, read_process
from gen_worker.launcher.attempt_records import AttemptRecord, record_path
from gen_worker.launcher.messages import LauncherInfo, encode
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.daemon.upkeep.singleton import read_daemon_info
from trn.registry.reader import RegistryReader

LOOK_EVERY_S = 0.05
LONGEST_PAUSE_S = 0.6
SHARES = {
    "daemon killed": 4,
    "daemon stopped and continued": 1,
    "worker killed": 3,
    "worker stopped for ever": 1,
    "worker terminated by a stranger": 1,
    "launcher killed": 1,
    "launcher stopped and continued": 1,
    "daemon without descriptors": 1,
    "disk filled": 1,
    "clock moved forward": 1,
    "clock moved back": 1,
    "pid reused": 1,
    **faulty_bus.SHARES,
    "power cut": 1,
    "record deleted": 1,
    "checkpoint of another": 1,
}
# The clock ends the backoffs of runs that were killed too often in a row: else there is soon nobody to kill.
KILLS = (
    "daemon killed",
    "daemon killed",
    "worker killed",
    "worker killed",
    "worker killed",
    "clock moved forward",
)
FULL_S = (0.5, 1.0, 1.5)  # below the heartbeat timeout of the harness
JUMPS_S = (60.0, 20 * 60.0, 5 * 3600.0)
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
REAP_PATIENCE_S = 5.0
MAX_TRIES_FOR_PID = 100

Worker = tuple[str, int, int, int | None]  # run id, attempt, pid, start ticks


class FaultStrikes:
    """`strike` deals one fault after the other. Counts what struck in `struck`; what was not possible is in `left_out`."""

    def __init__(
        self,
        home: Home,
        keeper: DaemonKeeper,
        *,
        disk: SmallDisk,
        clock: MovedClock,
        history: History,
        struck: Counter[str],
        dice: random.Random,
        diary: Path,
        bus: FaultyBus,
    ) -> None:
        self._bus = bus
        self._home = home
        self._diary = diary
        self._keeper = keeper
        self._disk = disk
        self._clock = clock
        self._history = history
        self._struck = struck
        self._dice = dice
        self._jumps_s = Deck(list(JUMPS_S), dice)
        self._full_s = Deck(list(FULL_S), dice)
        self._bystanders: list[subprocess.Popen[bytes]] = []
        self.num_struck = 0
        self.left_out: dict[str, str] = {}
        shares = dict(SHARES)
        if disk.problem:
            self.left_out["disk filled"] = f"a small disk cannot be mounted here: {disk.problem}"
            del shares["disk filled"]
        if bus.problem:
            self.left_out |= dict.fromkeys(faulty_bus.SHARES, bus.problem)
            shares = {name: share for name, share in shares.items() if name not in faulty_bus.SHARES}
        self._deck = Deck([name for name, share in shares.items() for _ in range(share)], dice)
        self._kills = Deck(list(KILLS), dice)

    async def strike(self, num_faults: int, *, min_kills: int = 0) -> None:
        """That many faults of all kinds, then kills until daemons and workers were killed `min_kills` times each."""
        acts: dict[str, Callable[[], Awaitable[bool]]] = {
            "daemon killed": self._kill_daemon,
            "daemon stopped and continued": self._pause_daemon,
            "worker killed": lambda: self._signal_worker(signal.SIGKILL),
            "worker stopped for ever": lambda: self._signal_worker(signal.SIGSTOP),
            "worker terminated by a stranger": lambda: self._signal_worker(signal.SIGTERM),
            "launcher killed": lambda: self._signal_launcher(signal.SIGKILL),
            "launcher stopped and continued": lambda: self._signal_launcher(signal.SIGSTOP),
            "daemon without descriptors": self._take_descriptors,
            "disk filled": self._fill_disk,
            "clock moved forward": lambda: self._move_clock(1),
            "clock moved back": lambda: self._move_clock(-1),
            "pid reused": self._reuse_pid,
            "redis killed": lambda: self._bus.kill(self._full_s.deal()),
            "redis and daemon killed": self._kill_both,
            "redis stopped and continued": lambda: self._bus.pause(self._full_s.deal()),
            "redis connections cut": self._bus.cut_connections,
            "redis out of memory": lambda: self._bus.fill(self._full_s.deal()),
            "power cut": self._cut_power,
            "record deleted": self._delete_record,
            "checkpoint of another": self._place_checkpoint,
        }
        began = time.monotonic()
        while self.num_struck < num_faults or min(self._num_kills()) < min_kills:
            await asyncio.sleep(self._dice.random() * LONGEST_PAUSE_S)
            name = (self._deck if self.num_struck < num_faults else self._kills).deal()
            while True:
                if await acts[name]():
                    break
                await asyncio.sleep(LOOK_EVERY_S)  # no victim yet
            self._struck[name] += 1
            self.num_struck += 1
            with self._diary.open("a") as diary:
                print(f"{time.monotonic() - began:8.2f} s  {name}", file=diary)

    def _num_kills(self) -> tuple[int, int]:
        """Of daemons, at random moments and at failpoints, and of workers."""
        daemons = sum(number for name, number in self._struck.items() if name.startswith("daemon killed"))
        return daemons, self._struck["worker killed"]

    def end(self) -> None:
        self._disk.make_room()
        for bystander in self._bystanders:
            bystander.kill()
            bystander.wait()

    # Processes

    async def _kill_daemon(self) -> bool:
        return self._keeper.kill()

    async def _kill_both(self) -> bool:
        """Redis, and the daemon that had yet to hear from it."""
        if self._bus.is_away or not self._keeper.kill():
            return False
        self._struck["daemon killed"] += 1
        return await self._bus.kill(self._full_s.deal())

    async def _pause_daemon(self) -> bool:
        return self._keeper.pause(1.0)

    async def _signal_worker(self, number: int) -> bool:
        workers = [
            worker
            for worker in self._living_workers()
            if number == signal.SIGKILL or not _is_stopped(worker[2])
        ]
        if not workers:
            return False
        return send(self._dice.choice(workers)[2], number)

    def _living_workers(self) -> list[Worker]:
        try:
            with contextlib.closing(RegistryReader(self._home.registry)) as registry:
                attempts = [
                    (run.run_id, attempt)
                    for run in registry.live()
                    for attempt in registry.attempts(run.run_id)
                    if attempt.ended_ms is None and attempt.pid
                ]
        except (TrnError, sqlite3.Error):  # the disk is full, say
            return []
        processes = [(run_id, one.number, ProcessIdentity.of(one.worker)) for run_id, one in attempts]
        return [
            (run_id, number, process.pid, process.start_ticks)
            for run_id, number, process in processes
            if process.is_alive()
        ]

    async def _signal_launcher(self, number: int) -> bool:
        pid = find_launcher(self._home)
        if pid is None or not send(pid, number):
            return False
        if number == signal.SIGSTOP:
            asyncio.get_running_loop().call_later(1.0, send, pid, signal.SIGCONT)
        return True

    async def _take_descriptors(self) -> bool:
        """As if all were in use: it keeps what it has, and gets no more."""
        pid = self._keeper.daemon.pid
        info = read_daemon_info(self._home)
        if info is None or info.pid != pid:
            return False  # one that starts without descriptors has to give up
        try:
            num_open = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, hard))
        except OSError:  # it was just killed
            return False

        def give_back() -> None:
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

        asyncio.get_running_loop().call_later(self._full_s.deal(), give_back)
        return True

    # Disk and clock

    async def _fill_disk(self) -> bool:
        if self._disk.is_full:
            return False
        await asyncio.to_thread(self._disk.fill)
        asyncio.get_running_loop().call_later(self._full_s.deal(), self._disk.make_room)
        return True

    async def _move_clock(self, direction: int) -> bool:
        self._clock.move(direction * self._jumps_s.deal())
        return True

    # Files that are not what they were

    async def _cut_power(self) -> bool:
        """What was not synced is found empty; the attempt gets its terminal event all the same."""
        async with self._keeper.is_down:
            if self._disk.is_full or not self._living_workers():
                return False
            self._struck["daemon killed"] += self._keeper.kill()
            await asyncio.to_thread(self._keeper.daemon.process.wait)
            while await self._signal_launcher(signal.SIGKILL):
                continue
            workers = self._living_workers()
            if not workers:
                return False
            run_id, _, pid, _ = self._dice.choice(workers)
            if not send(pid, signal.SIGKILL):
                return False
            folder = self._home.run(run_id)
            for path in (folder.job, folder.contract):
                path.write_bytes(b"")
        return True

    async def _delete_record(self) -> bool:
        """The registry knows the process: it is adopted, and no second one is started beside it."""
        async with self._keeper.is_down:
            if not self._living_workers():
                return False
            self._struck["daemon killed"] += self._keeper.kill()
            await asyncio.to_thread(self._keeper.daemon.process.wait)
            workers = self._living_workers()
            if not workers:
                return False
            run_id, number, _, _ = self._dice.choice(workers)
            record_path(str(self._home.run(run_id).attempts), number).unlink(missing_ok=True)
        return True

    async def _place_checkpoint(self) -> bool:
        """It is newer than what the run saved, or not; the run goes on from its own."""
        if self._disk.is_full:
            return False
        for run_id, _, _, _ in self._living_workers():
            folder = self._home.run(run_id).checkpoints
            own = {path.name for path in folder.glob("*.meta.json")}
            others = [
                path
                for path in self._home.runs.glob("*/checkpoints/step-*.meta.json")
                if path.parent != folder and path.name not in own
            ]
            if own and others:
                meta = self._dice.choice(others)
                self._history.foreign.add(run_id)
                with contextlib.suppress(FileNotFoundError):  # its run's retention was quicker
                    data = meta.with_name(meta.name.replace(".meta.json", ".pt"))
                    shutil.copy(data, folder / data.name)
                    shutil.copy(meta, folder / meta.name)
                    return True
        return False

    # A pid that is somebody else's by now

    async def _reuse_pid(self) -> bool:
        """A worker dies while nobody looks, and its pid goes to a bystander, who must never notice."""
        async with self._keeper.is_down:
            if self._disk.is_full or not self._living_workers():
                return False
            self._struck["daemon killed"] += self._keeper.kill()
            await asyncio.to_thread(self._keeper.daemon.process.wait)
            while await self._signal_launcher(signal.SIGKILL):
                continue
            workers = self._living_workers()
            if not workers:
                return False
            run_id, number, pid, _ = self._dice.choice(workers)
            if not send(pid, signal.SIGKILL):
                return False
            bystander = await asyncio.to_thread(_start_with_pid, pid)
            if bystander.pid != pid:
                self._struck["pid reused: only by the attempt's record"] += 1
                path = record_path(str(self._home.run(run_id).attempts), number)
                told = msgspec.json.decode(path.read_bytes(), type=AttemptRecord)
                replace_file(path, encode(msgspec.structs.replace(told, pid=bystander.pid)))
        state = read_process(bystander.pid)
        assert state is not None
        self._bystanders.append(bystander)
        self._history.bystanders[bystander.pid] = state.start_ticks
        return True


def _start_with_pid(pid: int) -> subprocess.Popen[bytes]:
    """A process of a session of its own: with that pid where the system lets us choose, else with any. Blocks."""
    deadline = time.monotonic() + REAP_PATIENCE_S
    while read_process(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # somebody has yet to reap it
    for _ in range(MAX_TRIES_FOR_PID):
        can_choose = read_process(pid) is None
        if can_choose:
            try:
                LAST_PID.write_text(str(pid - 1))
            except OSError:
                can_choose = False
        process = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        if process.pid == pid or not can_choose:
            return process
        process.kill()  # somebody else was quicker
        process.wait()
    return subprocess.Popen(["sleep", "3600"], start_new_session=True)


def find_launcher(home: Home) -> int | None:
    for path in home.launcher.glob("*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            info = msgspec.json.decode(path.read_bytes(), type=LauncherInfo)
            if is_same_process(info.pid, info.start_ticks, info.boot_id):
                return info.pid
    return None


def send(pid: int, number: int) -> bool:
    """False where it ended by itself meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    state = read_process(pid)
    return state is not None and state.letter == "T"
