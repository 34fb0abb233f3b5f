"""A part of the daemon that blocks, and so works in its own thread."""

import asyncio
import contextlib
import logging
import threading
from typing import ClassVar

from trn.daemon.upkeep.retries import Pause, is_daemon_fault

logger = logging.getLogger("trn.daemon")


class ThreadedPart:
    """`run` is a task of the daemon, `wake` is for any thread, everything else belongs to the part's own thread.

    `warnings` are for the operator.
    """

    thread_name: ClassVar[str]
    stop_s: ClassVar[float]  # how long the thread may take to stop; after that it is abandoned

    def __init__(self) -> None:
        self._wake = threading.Event()
        self.warnings: list[str] = []

    def wake(self) -> None:
        """Something was committed. Cheap."""
        if not self._wake.is_set():
            self._wake.set()

    def work(self, stop: threading.Event) -> None:
        """In the thread. Returns soon after `stop` is set and the part is woken."""
        raise NotImplementedError

    async def run(self) -> None:
        """Until cancelled; then stop the thread. After a fault of the daemon itself `work` begins again; others are raised."""
        pause = Pause()
        while True:
            try:
                return await self._run_thread()
            except Exception as fault:
                if not is_daemon_fault(fault):
                    raise
                logger.warning("%s: %s; will try again", self.thread_name, fault)
            await pause.rest()

    async def _run_thread(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        stop = threading.Event()

        def settle(fault: BaseException | None) -> None:
            if not ended.done():
                ended.set_exception(fault) if fault else ended.set_result(None)

        def work() -> None:
            fault: BaseException | None = None
            try:
                self.work(stop)
            except BaseException as raised:
                fault = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, fault)

        # A daemon thread: a hanging socket does not keep the process alive.
        threading.Thread(target=work, name=self.thread_name, daemon=True).start()
        try:
            await asyncio.shield(ended)
        finally:
            stop.set()
            self._wake.set()
            await asyncio.wait([ended], timeout=self.stop_s)
