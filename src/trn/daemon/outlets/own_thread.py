"""A part of the daemon that blocks: it has a thread of its own, so nobody else waits."""

import asyncio
import contextlib
import threading
from collections.abc import Callable


class OwnThread:
    """Runs `work(stop)` in a thread; `work` returns soon after `stop` is set, or is left to itself."""

    def __init__(self, name: str, work: Callable[[threading.Event], None], *, patience_s: float) -> None:
        self._name = name
        self._work = work
        self._patience_s = patience_s
        self.stop = threading.Event()

    async def run(self, wake: Callable[[], None] = lambda: None) -> None:
        """Until cancelled; then `stop` is set, `wake` is called, and the thread has so long to come to an end.

        What the work raises is raised here.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def settle(fault: BaseException | None) -> None:
            if not ended.done():
                ended.set_exception(fault) if fault else ended.set_result(None)

        def work() -> None:
            fault: BaseException | None = None
            try:
                self._work(self.stop)
            except BaseException as raised:
                fault = raised
            with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
                loop.call_soon_threadsafe(settle, fault)

        # A daemon thread: one that hangs in a socket does not keep the process.
        threading.Thread(target=work, name=self._name, daemon=True).start()
        try:
            await asyncio.shield(ended)
        finally:
            self.stop.set()
            wake()
            await asyncio.wait([ended], timeout=self._patience_s)
