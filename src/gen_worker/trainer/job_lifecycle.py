"""Signals, heartbeat, time limit and grace period of an attempt.

    STARTING ──> RUNNING ──> COMPLETED
        │           │
        └───────────┴──────> FAILED(category)

The attempt writes the terminal event, or the watcher when a step still runs after the grace period. The reporter
writes only the first.

The loop reads `stop.reason`, an attribute. The watcher thread does everything that needs a system call: the cancel
file, the clock, the heartbeat. So heartbeats continue during a step of any length.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gen_worker.errors import EXIT_CODE_BY_CATEGORY, Category, TrainingCanceled, TrainingTimeout, mark_report
from gen_worker.trainer.contracts import Progress, StopSignal
from gen_worker.trainer.reporting import TrainingReporter

logger = logging.getLogger("gen_worker.lifecycle")

PAUSE_SLICE_S = 0.1

WATCH_EVERY_S = 0.2
ONE_KEYPRESS_S = 0.5  # one Ctrl-C may arrive twice, through a wrapper that relays signals
_OURS = str(Path(__file__).resolve().parent.parent)
_CALLS_THE_AUTHOR = (
    "api.py",
    "author_state.py",
    "base.py",
    "batch_source.py",
    "callback_list.py",
    "collate.py",
    "evaluation.py",
    "iterables.py",
    "loader.py",
    "loop.py",
    "opening.py",
    "plugin_import.py",
    "rows.py",
    "saving.py",
)


class JobLifecycle:
    """Of one attempt. Enter it in the main thread."""

    def __init__(
        self,
        *,
        reporter: TrainingReporter,
        stop: StopSignal,
        progress: Progress,
        heartbeat_s: float,
        grace_s: float,
        time_limit_s: float | None = None,
        cancel_file: Path | None = None,
        is_stepwise: bool = True,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._reporter = reporter
        self._stop = stop
        self._progress = progress
        self._heartbeat_s = heartbeat_s
        self._grace_s = grace_s
        self._time_limit_s = time_limit_s
        self._cancel_file = cancel_file
        self._is_stepwise = is_stepwise
        self._clock = clock
        self._exit_process = exit_process
        self.on_look: list[Callable[[], None]] = []  # called in each round of the watcher
        self.on_overrun: Callable[[Category, str], None] = lambda _category, _error: None
        self._pid = os.getpid()
        self._started = clock()
        self._next_beat = self._started + heartbeat_s
        self._stop_seen: float | None = None
        self._interrupted = float("-inf")
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="lifecycle-watcher", daemon=True)
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> "JobLifecycle":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        self.look()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def look(self) -> None:
        """One round of the watcher: heartbeat, cancel file, time limit, grace period."""
        if self._reporter.terminal_event is not None:
            return
        for look in self.on_look:
            look()
        now = self._clock()
        if self._stop.reason is None:
            if self._has_cancel_file():
                self._stop.request(f"cancelled: the file {self._cancel_file} was found")
            elif self._time_limit_s is not None and now - self._started >= self._time_limit_s:
                self._stop.request(f"the time limit of {self._time_limit_s:g} s was reached", "timeout")
        elif self._stop_seen is None:
            self._stop_seen = now
        elif now - self._stop_seen >= self._grace_s:
            self._overrun()
        if now >= self._next_beat:
            self._next_beat = now + self._heartbeat_s
            self._reporter.heartbeat(self._progress.step, self._progress.epoch)

    def _has_cancel_file(self) -> bool:
        try:
            return self._cancel_file is not None and self._cancel_file.exists()
        except OSError as fault:  # must not end the watcher
            logger.warning(
                "the cancel file %s cannot be checked, and is ignored from now on: %s",
                self._cancel_file,
                fault,
            )
            self._cancel_file = None
            return False

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_EVERY_S):
            self.look()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that the author's code forked: the signal's default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        if self._reporter.terminal_event is not None:
            return
        is_repeated = self._clock() - self._interrupted < ONE_KEYPRESS_S
        is_second = self._stop.reason is not None and number == signal.SIGINT and not is_repeated
        if is_second and self._is_stepwise and _is_in_authors_code(frame):
            raise TrainingCanceled(
                f"{name} a second time: stopped without saving. Steps since the last checkpoint are lost"
            )
        if self._stop.reason is None:
            self._interrupted = self._clock()
            self._stop.request(f"cancelled by {name}")
            after = " after this step" if self._is_stepwise else ""
            is_saved = self._is_stepwise and number == signal.SIGINT
            again = "; Ctrl-C again stops without saving" if is_saved else ""
            limit = f", at most {self._grace_s:g} s" if self._grace_s < float("inf") else ""
            # Not through logging: the interrupted code may hold its lock.
            os.write(2, f"gen_worker: stopping{after}{limit}{again}\n".encode())

    def _overrun(self) -> None:
        """The step did not end within the grace period: report, and exit without it."""
        category = Category(self._stop.category)
        self._ended.set()
        error = (
            f"{self._stop.reason}; the work in progress at step {self._progress.step} did not end within the grace of"
            f" {self._grace_s:g} s. Steps that were not saved before are lost"
        )
        try:
            self.on_overrun(category, error)
            self._reporter.failed(step=self._progress.step, error=error, category=category)
            print(mark_report(f"{category}: {error}"), file=sys.stderr)  # noqa: T201
        except Exception:  # it must exit in any case
            logger.exception("the terminal event could not be written")
        sys.stderr.flush()
        self._exit_process(int(EXIT_CODE_BY_CATEGORY[category]))


def _is_in_authors_code(frame: FrameType | None) -> bool:
    """True where the nearest frame of ours calls the author's code: an exception there breaks none of our state."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return Path(path).name in _CALLS_THE_AUTHOR
        frame = frame.f_back
    return False


def raise_stop(stop: StopSignal) -> NoReturn:
    """The stop request as an exception."""
    reason = stop.reason or "cancelled"
    if stop.category == "timeout":
        raise TrainingTimeout(reason)
    raise TrainingCanceled(reason)


def pause(stop: StopSignal, seconds: float) -> None:
    """Wait, or return early on a stop request."""
    wake_at = time.monotonic() + seconds
    while stop.reason is None and (left_s := wake_at - time.monotonic()) > 0:
        time.sleep(min(left_s, PAUSE_SLICE_S))
