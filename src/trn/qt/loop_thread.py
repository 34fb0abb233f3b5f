"""A QThread with an event loop of asyncio in it, which ends within a second however busy it is."""

import asyncio
import atexit
import contextlib
import threading
from collections.abc import Callable

from PySide6.QtCore import QCoreApplication, QThread, Slot

STOP_TIMEOUT_MS = 1000

# Qt aborts the process if a QThread is destroyed while it runs, so those that were started are kept here.
_kept: set["LoopThread"] = set()


class LoopThread(QThread):
    """Runs `serve` until it returns or `stop` is called. Also ends with the application and with the interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[Callable[[], object]] = []  # calls of before the loop began
        self._is_stopped = False
        self._has_application = False

    async def serve(self) -> None:
        """What the thread does. Cancelled by `stop`."""
        raise NotImplementedError

    def start(self, priority: QThread.Priority = QThread.Priority.InheritPriority) -> None:
        """Returns at once. A stopped thread may be started again."""
        if self.isRunning():
            return
        _kept.difference_update([thread for thread in _kept if thread.isFinished()])
        _kept.add(self)
        self._is_stopped = False
        application = QCoreApplication.instance()
        if application is not None and not self._has_application:
            self._has_application = True
            application.aboutToQuit.connect(self._end_with_application)
        super().start(priority)

    def stop(self) -> bool:
        """End the thread and wait for it, a second at most. Returns whether it has ended. For any thread but this one."""
        with self._lock:
            self._is_stopped = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)
        if QThread.currentThread() is self:
            return False  # a slot that is connected directly runs in here
        return self.wait(STOP_TIMEOUT_MS)

    def run(self) -> None:
        """Qt calls this in the new thread."""
        with asyncio.Runner() as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._serve_until_stopped())

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call it in the thread's loop, at the earliest when that has begun. For any thread."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
            elif not self._is_stopped:
                self._early.append(call)

    async def _serve_until_stopped(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            early, self._early = self._early, []
            for call in early:
                self._loop.call_soon(call)
        try:
            await self.serve()
        finally:
            with self._lock:
                self._loop = self._task = None

    @Slot()
    def _end_with_application(self) -> None:
        self.stop()


@atexit.register
def _stop_all() -> None:
    for thread in list(_kept):
        thread.stop()
