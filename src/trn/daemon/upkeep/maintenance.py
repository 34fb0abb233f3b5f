"""What the daemon does now and then: bring the write-ahead logs back into their files, remove code snapshots that no run
names, look at the disk and at the databases' files, leave when idle.

A checkpoint that comes back busy means that some reader has held the log for long. Once is nothing; a streak means
that a process is stuck and the log grows, so it is said.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from gen_worker.contract.sizes import show_bytes
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.settings import Settings
from trn.core.snapshots import collect_garbage

logger = logging.getLogger("trn.daemon.upkeep.maintenance")

BUSY_STREAK = 3
COLLECT_EVERY_S = 3600.0
LOOK_EVERY_S = 5.0


class WalFile(Protocol):
    def checkpoint_wal(self) -> tuple[int, int, int]: ...


class DatabaseFile(WalFile, Protocol):
    def find_problem(self) -> str: ...
    def rescue(self, target: Path) -> None: ...


class WalKeeper:
    """Checkpoints one file, and remembers how often in a row somebody was in the way."""

    def __init__(self, name: str, file: WalFile) -> None:
        self._name = name
        self._file = file
        self.busy_streak = 0

    def checkpoint(self) -> None:
        busy, num_log, num_checkpointed = self._file.checkpoint_wal()
        self.busy_streak = self.busy_streak + 1 if busy else 0
        if self.busy_streak >= BUSY_STREAK:
            logger.warning(
                "%s: its log could not be emptied %d times in a row (busy %d, log %d, checkpointed %d): a process"
                " reads it without end; look for it with fuser",
                self._name,
                self.busy_streak,
                busy,
                num_log,
                num_checkpointed,
            )
        else:
            logger.debug(
                "%s: checkpoint: busy %d, log %d, checkpointed %d",
                self._name,
                busy,
                num_log,
                num_checkpointed,
            )


class Maintenance:
    """`run` is one task of the daemon; `warnings` are what an operator should know now."""

    def __init__(
        self,
        *,
        home: Home,
        settings: Settings,
        files: dict[str, DatabaseFile],
        snapshots_in_use: Callable[[], set[str]],
        is_busy: Callable[[], bool],
        leave: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home = home
        self._settings = settings
        self._files = files
        self._keepers = [WalKeeper(name, file) for name, file in files.items()]
        self._gone: dict[str, str] = {}  # of files that are not at their place: what an operator has to know
        self._snapshots_in_use = snapshots_in_use
        self._is_busy = is_busy
        self._leave = leave
        self._clock = clock
        self._last_busy = clock()
        self._next_collection = clock() + COLLECT_EVERY_S
        self._place = self._find_place()
        self._disk_warnings: list[str] = []

    @property
    def warnings(self) -> list[str]:
        return [*self._gone.values(), *self._disk_warnings]

    async def run(self) -> None:
        settings = self._settings
        next_round = self._clock() + settings.maintenance_s
        pause_s = min(LOOK_EVERY_S, settings.maintenance_s, (settings.idle_exit_s or LOOK_EVERY_S) / 4)
        while True:
            await asyncio.sleep(pause_s)
            if not self._is_home_there():
                self._leave(f"{self._home.root} is gone, or another folder is in its place")
                return
            await asyncio.to_thread(self.look_at_files)
            self.look_for_idleness()
            if self._clock() >= next_round:
                next_round = self._clock() + settings.maintenance_s
                await asyncio.to_thread(self.keep)
            if self._clock() >= self._next_collection:
                self._next_collection = self._clock() + COLLECT_EVERY_S
                await self.collect()

    def _find_place(self) -> tuple[int, int]:
        found = self._home.root.stat()
        return found.st_dev, found.st_ino

    def _is_home_there(self) -> bool:
        """Whoever serves a home that was moved away would acknowledge what nobody finds again."""
        try:
            return self._find_place() == self._place
        except OSError:
            return False

    def look_at_files(self) -> None:
        """See that each database is still where it was opened; of one that is not, keep a copy. Blocks; any thread."""
        for name, file in self._files.items():
            try:
                problem = file.find_problem()
                if problem and name not in self._gone:
                    self._gone[name] = self._say_gone(problem, self._rescue(name, file))
                    logger.error("%s", self._gone[name])
                elif not problem and self._gone.pop(name, ""):
                    logger.warning("%s is in its place again", name)
            except Exception:
                logger.exception("%s could not be looked at; it is tried again", name)

    def _rescue(self, name: str, file: DatabaseFile) -> str:
        folder = self._home.backups / time.strftime("rescued-%Y%m%d-%H%M%S")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.rescue(folder / name)
        except Exception:
            logger.exception("what this daemon has of %s could not be saved", name)
            return ""
        return str(folder / name)

    @staticmethod
    def _say_gone(problem: str, copy: str) -> str:
        saved = f" What it has is saved in {copy}." if copy else ""
        return (
            f"{problem}: nothing is recorded any more, submits are refused, workers go on.{saved} Stop the daemon, put a"
            " copy in its place without the files -wal and -shm, and start the daemon again"
        )

    def look_for_idleness(self) -> None:
        """Leave where nothing ran and nobody asked for `idle_exit_s`."""
        if self._settings.idle_exit_s is None:
            return
        if self._is_busy():
            self._last_busy = self._clock()
        elif self._clock() - self._last_busy >= self._settings.idle_exit_s:
            self._leave(f"idle for {self._settings.idle_exit_s:g} s")

    async def collect(self) -> None:
        """Remove the code that no run names."""
        try:
            done = await asyncio.to_thread(collect_garbage, self._home.snapshots, self._snapshots_in_use())
        except (OSError, TrnError):
            logger.exception("old code snapshots could not be removed; it is tried again")
        else:
            if done.num_manifests or done.num_objects:
                logger.info("removed %d code snapshots, %d bytes", done.num_manifests, done.freed_bytes)

    def keep(self) -> None:
        """One round. Blocks on the disk; any thread."""
        for keeper in self._keepers:
            try:
                keeper.checkpoint()
            except Exception:
                logger.exception("a checkpoint failed; it is tried again")
        try:
            free = shutil.disk_usage(self._home.root).free
        except OSError as fault:
            logger.warning("how much room there is cannot be found out: %s", fault)
            return
        warnings = []
        if free < 4 * self._settings.min_free_bytes:
            warnings.append(f"{self._home.root} has only {show_bytes(free)} free")
        for warning in set(warnings) - set(self._disk_warnings):
            logger.warning("%s", warning)
        self._disk_warnings = warnings
