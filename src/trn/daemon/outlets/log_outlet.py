"""Logs for machines: a thread that copies new lines and compresses past days."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from gen_worker.contract.doubling_delay import DoublingDelay
from trn.core.errors import TrnError
from trn.core.home import Home
from trn.core.settings import Settings
from trn.daemon.outlets.closed_days import ClosedDays
from trn.daemon.outlets.log_copier import LogCopier
from trn.daemon.outlets.own_thread import OwnThread
from trn.registry.base import Registry

logger = logging.getLogger("trn.daemon.logs")

EVERY_S = 0.25  # at least between two rounds: lines in between share a sync
WORK_SHARE = 0.05  # of its time: in a burst of submits it falls behind instead of slowing the daemon
LONGEST_WAIT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # after an error of the registry
STOP_S = 5.0


class LogOutlet:
    """`run` is a task of the daemon, `wake` is for any thread, everything else belongs to its own thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        home: Home,
        settings: Settings,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._registry = registry
        self._home = home
        self._settings = settings
        self._clock_ms = clock_ms
        self._wake = threading.Event()
        self.warnings: list[str] = []

    def wake(self) -> None:
        """Something was committed. Any thread, and cheap."""
        if not self._wake.is_set():
            self._wake.set()

    async def run(self) -> None:
        """Copy until cancelled; then once more."""
        await OwnThread("logs", self._work, patience_s=STOP_S).run(self._wake.set)

    def _work(self, stop: threading.Event) -> None:
        copier = LogCopier(
            registry=self._registry, home=self._home, settings=self._settings, clock_ms=self._clock_ms
        )
        days = ClosedDays(
            folders=copier.folders,
            min_free_bytes=self._settings.min_free_bytes,
            clock_ms=self._clock_ms,
        )
        fault_delay = DoublingDelay(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while not stop.is_set():
                self._wake.clear()  # before reading: what is committed from here on wakes again
                began = time.monotonic()
                try:
                    pause_s = copier.copy()
                    if pause_s != 0 and not days.step():
                        until_day_s = (days.next_ms - self._clock_ms()) / 1000
                        pause_s = until_day_s if pause_s is None else min(pause_s, until_day_s)
                        took_s = time.monotonic() - began
                        stop.wait(min(max(EVERY_S, took_s / WORK_SHARE), LONGEST_WAIT_S))
                        self._wake.wait(pause_s)
                    fault_delay.reset()
                except Exception as fault:  # nothing is lost: the lines are in the runs' folders
                    is_ours = not isinstance(fault, TrnError | OSError)
                    logger.warning("logs cannot be copied now: %s; will try again", fault, exc_info=is_ours)
                    stop.wait(fault_delay.next_s())
                finally:
                    self.warnings = copier.warnings
            with contextlib.suppress(Exception):  # the next daemon continues
                copier.copy()
        finally:
            copier.close()
