"""Runs a blocking part of the daemon in its own thread."""

import asyncio
import contextlib
import threading
from collections.abc import Callable


class OwnThread:
    """Runs `work(stop)` in a thread. `work` returns soon after `stop` is set; else it is abandoned."""

    def __init__(self, name: str, work: Callable[[threading.Event], None], *, patience_s: float) -> None:
        self._name = name
        self._work = work
        self._patience_s = patience_s
        self.stop = threading.Event()

    async def run(self, wake: Callable[[], None] = lambda: None) -> None:
        """Until cancelled; then set `stop`, call `wake`, and wait up to `patience_s` for the thread.

        Raises what the work raises.
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
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, fault)

        # A daemon thread: a hanging socket does not keep the process alive.
        threading.Thread(target=work, name=self._name, daemon=True).start()
        try:
            await asyncio.shield(ended)
        finally:
            self.stop.set()
            wake()
            await asyncio.wait([ended], timeout=self._patience_s)
