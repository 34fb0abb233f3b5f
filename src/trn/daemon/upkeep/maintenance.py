"""Periodic work: WAL checkpoints, removal of unused code snapshots, checks of the disk, the databases and the installed
code of trn, exit when idle.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from gen_worker.contract.installed_packages import source_stamp
from gen_worker.contract.sizes import show_bytes
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.settings import Settings
from trn.core.snapshots import collect_garbage
from trn.core.version import CHANGED, SOURCES

logger = logging.getLogger("trn.daemon.upkeep.maintenance")

BUSY_STREAK = 3  # one busy checkpoint is normal; a streak means that a process holds the WAL
COLLECT_EVERY_S = 3600.0
LOOK_EVERY_S = 5.0
COMPARE_EVERY_S = 1.0


class DatabaseFile(Protocol):
    def checkpoint_wal(self) -> tuple[int, int, int]: ...
    def find_problem(self) -> str: ...
    def rescue(self, target: Path) -> None: ...


class InstalledCode:
    """The files of trn, as they were at the start. Compares them again when asked, at most once a second."""

    def __init__(
        self, folders: Sequence[Path] = SOURCES, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folders = folders
        self._clock = clock
        self._compared_at = clock()
        self._has_changed = False
        self.stamp = source_stamp(*folders)

    @property
    def warnings(self) -> list[str]:
        """That trn was upgraded: the daemon keeps running the code that it has imported."""
        if not self._has_changed and self._clock() - self._compared_at >= COMPARE_EVERY_S:
            self._compared_at = self._clock()
            try:
                self._has_changed = source_stamp(*self._folders) != self.stamp
            except OSError:  # being replaced, or gone
                self._has_changed = True
        return [CHANGED] if self._has_changed else []


class Maintenance:
    """`run` is a task of the daemon; `warnings` are for the operator."""

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
        self._busy_streaks = dict.fromkeys(files, 0)  # WAL checkpoints in a row that a reader blocked
        self._gone: dict[str, str] = {}  # a warning for each database file that was moved or deleted
        self._snapshots_in_use = snapshots_in_use
        self._is_busy = is_busy
        self._leave = leave
        self._clock = clock
        self._last_busy = clock()
        self._next_collection = clock() + COLLECT_EVERY_S
        self._place = self._find_place()
        self._disk_warning = ""

    @property
    def warnings(self) -> list[str]:
        return [*self._gone.values(), *filter(None, [self._disk_warning])]

    async def run(self) -> None:
        settings = self._settings
        next_round = self._clock() + settings.maintenance_s
        pause_s = min(LOOK_EVERY_S, settings.maintenance_s, (settings.idle_exit_s or LOOK_EVERY_S) / 4)
        while True:
            await asyncio.sleep(pause_s)
            if not self._is_home_there():
                self._leave(f"{self._home.root} was moved or deleted")
                return
            await asyncio.to_thread(self.check_files)
            self.check_idle()
            if self._clock() >= next_round:
                next_round = self._clock() + settings.maintenance_s
                await asyncio.to_thread(self.do_round)
            if self._clock() >= self._next_collection:
                self._next_collection = self._clock() + COLLECT_EVERY_S
                await self.collect()

    def _find_place(self) -> tuple[int, int]:
        found = self._home.root.stat()
        return found.st_dev, found.st_ino

    def _is_home_there(self) -> bool:
        """Serving a moved home would acknowledge runs that cannot be found again."""
        try:
            return self._find_place() == self._place
        except OSError:
            return False

    def check_files(self) -> None:
        """Check that each database file is still in place; save a copy of one that is not. Blocks; any thread."""
        for name, file in self._files.items():
            try:
                problem = file.find_problem()
                if problem and name not in self._gone:
                    self._gone[name] = _gone_text(problem, self._rescue(name, file))
                    logger.error("%s", self._gone[name])
                elif not problem and self._gone.pop(name, ""):
                    logger.warning("%s is back in place", name)
            except Exception:
                logger.exception("%s cannot be checked; will try again", name)

    def _rescue(self, name: str, file: DatabaseFile) -> str:
        folder = self._home.backups / time.strftime("rescued-%Y%m%d-%H%M%S")
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.rescue(folder / name)
        except Exception:
            logger.exception("%s cannot be saved", name)
            return ""
        return str(folder / name)

    def check_idle(self) -> None:
        """Exit after `idle_exit_s` without runs and calls."""
        if self._settings.idle_exit_s is None:
            return
        if self._is_busy():
            self._last_busy = self._clock()
        elif self._clock() - self._last_busy >= self._settings.idle_exit_s:
            self._leave(f"idle for {self._settings.idle_exit_s:g} s")

    async def collect(self) -> None:
        """Remove code snapshots that no run uses."""
        try:
            done = await asyncio.to_thread(collect_garbage, self._home.snapshots, self._snapshots_in_use())
        except (OSError, TrnError):
            logger.exception("unused code snapshots cannot be removed; will try again")
        else:
            if done.num_manifests or done.num_objects:
                logger.info("removed %d code snapshots, %d bytes", done.num_manifests, done.freed_bytes)

    def do_round(self) -> None:
        """Checkpoint the databases and check the disk. Blocks; any thread."""
        for name, file in self._files.items():
            try:
                self._checkpoint(name, file)
            except Exception:
                logger.exception("%s: WAL checkpoint failed; will try again", name)
        try:
            free = shutil.disk_usage(self._home.root).free
        except OSError as fault:
            logger.warning("free disk space cannot be read: %s", fault)
            return
        is_low = free < 4 * self._settings.min_free_bytes
        warning = f"{self._home.root} has only {show_bytes(free)} free" if is_low else ""
        if warning and warning != self._disk_warning:
            logger.warning("%s", warning)
        self._disk_warning = warning

    def _checkpoint(self, name: str, file: DatabaseFile) -> None:
        busy, num_log, num_checkpointed = file.checkpoint_wal()
        streak = self._busy_streaks[name] = self._busy_streaks[name] + 1 if busy else 0
        if streak >= BUSY_STREAK:
            logger.warning(
                "%s: WAL checkpoint blocked %d times in a row (busy %d, log %d, checkpointed %d): a process keeps"
                " reading it; find it with fuser",
                name,
                streak,
                busy,
                num_log,
                num_checkpointed,
            )


def _gone_text(problem: str, copy: str) -> str:
    saved = f" Its content is saved in {copy}." if copy else ""
    return (
        f"{problem}: nothing is recorded any more, submits are refused, workers continue.{saved} Stop the daemon, put a"
        " copy in its place without the files -wal and -shm, and start the daemon again"
    )
