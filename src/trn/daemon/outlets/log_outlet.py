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
from trn.daemon.outlets.threaded_part import ThreadedPart
from trn.executors.base import FilesByPool
from trn.registry.base import Registry

logger = logging.getLogger("trn.daemon.logs")

EVERY_S = 0.25  # at least between two rounds: lines in between share a sync
WORK_SHARE = 0.05  # of its time: in a burst of submits it falls behind instead of slowing the daemon
LONGEST_WAIT_S = 2.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0  # after an error of the registry


class LogOutlet(ThreadedPart):
    thread_name = "logs"
    stop_s = 5.0

    def __init__(
        self,
        *,
        registry: Registry,
        files: FilesByPool,
        home: Home,
        settings: Settings,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        super().__init__()
        self._registry = registry
        self._files = files
        self._home = home
        self._settings = settings
        self._clock_ms = clock_ms

    def work(self, stop: threading.Event) -> None:
        """Copy until `stop`; then once more."""
        copier = LogCopier(
            registry=self._registry,
            files=self._files,
            home=self._home,
            settings=self._settings,
            clock_ms=self._clock_ms,
        )
        days = ClosedDays(
            folders=copier.folders,
            min_free_bytes=self._settings.min_free_bytes,
            clock_ms=self._clock_ms,
        )
        pause = DoublingDelay(FIRST_PAUSE_S, MAX_PAUSE_S)
        with contextlib.closing(copier):
            while not stop.is_set():
                self._wake.clear()  # before reading: what is committed from here on wakes again
                began = time.monotonic()
                try:
                    wait_s = copier.copy()
                    if wait_s != 0 and not days.step():
                        until_day_s = (days.next_ms - self._clock_ms()) / 1000
                        took_s = time.monotonic() - began
                        stop.wait(min(max(EVERY_S, took_s / WORK_SHARE), LONGEST_WAIT_S))
                        self._wake.wait(until_day_s if wait_s is None else min(wait_s, until_day_s))
                    pause.reset()
                except Exception as fault:  # nothing is lost: the lines are in the runs' folders
                    is_bug = not isinstance(fault, TrnError | OSError)
                    logger.warning("logs cannot be copied: %s; will try again", fault, exc_info=is_bug)
                    stop.wait(pause.next_s())
                finally:
                    self.warnings = copier.warnings
            with contextlib.suppress(Exception):  # the next daemon continues
                copier.copy()
