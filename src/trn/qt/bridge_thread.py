"""TrainerQBridgeThread: runs and events of a daemon as signals of Qt.

    daemon ── WatchRuns, StreamEvents ──> run() in this thread ── queued signals ──> slots of your thread
                                                ^                                          │
                                                └────────── all of them were handled ──────┘

The thread hands on a batch, and the next one when your thread has handled it. So a busy window never has more than one
batch before it; meanwhile newer records replace older ones, and events wait in order.
"""

import asyncio
import re
import time
from pathlib import Path

from PySide6.QtCore import Signal, Slot

from trn.client.client import AsyncClient
from trn.core.errors import InvalidRequestError
from trn.qt.loop_thread import LoopThread
from trn.qt.run_stream import ANSWER_TIMEOUT_S, ConnectionState, Inbox, RunStream, WatchRequest

PAINT_EVERY_S = 0.1  # at most one record of each run
MAX_RUNS_AT_ONCE = 50
MAX_EVENTS_AT_ONCE = 500
_ADDRESS = re.compile(r"[^/]+:\d{1,5}")


class TrainerQBridgeThread(LoopThread):
    """Follows runs in a thread of its own and tells your thread by queued signals. Reconnects by itself.

    - `runUpdated`: a `Run`, frozen. Of each run the newest, at most ten times a second.
    - `eventsReceived`: a `RunEvents`, if the request is `with_events`. Every event, in order, once.
    - `connectionChanged`: a word of `ConnectionState`. `reason` has the last error as text.

    `address_or_home` is the daemon's home (None: the default one) or its address, `host:port`; then `token` and
    `ca_certificate` or `is_insecure` are as for `trn.Client`. It starts no daemon.

    Create it in the thread whose slots it shall call, which needs an event loop of Qt. Decorate these slots with `@Slot`.
    Call `stop` when your window closes.
    """

    runUpdated = Signal(object)  # noqa: N815 - names of Qt
    eventsReceived = Signal(object)  # noqa: N815
    connectionChanged = Signal(str)  # noqa: N815
    _handed_on = Signal()

    def __init__(
        self,
        address_or_home: Path | str | None = None,
        watch_request: WatchRequest | None = None,
        *,
        token: str = "",
        ca_certificate: Path | str = "",
        is_insecure: bool = False,
    ) -> None:
        super().__init__()
        self.reason = ""
        home, address = _home_or_address(address_or_home)
        if not address and (token or ca_certificate or is_insecure):
            raise InvalidRequestError(
                "token, ca_certificate and is_insecure are for an address, not for a home"
            )

        def connect() -> AsyncClient:
            return AsyncClient(
                home,
                address=address,
                token=token,
                ca_certificate=ca_certificate,
                is_insecure=is_insecure,
                patience_s=0,  # the bridge retries, and reports it
                timeout_s=ANSWER_TIMEOUT_S,
            )

        self._stream = RunStream(connect, watch_request or WatchRequest(), self._tell)
        self._state: ConnectionState | None = None
        self._is_handled = asyncio.Event()
        self._handed_on.connect(self._note_handled)

    async def serve(self) -> None:
        self._is_handled = asyncio.Event()
        self._stream.inbox.open()
        handing_on = asyncio.create_task(self._hand_on())
        try:
            await self._stream.follow()
            await self._stream.inbox.is_empty.wait()  # it was refused
        finally:
            handing_on.cancel()
            if self._state is not ConnectionState.REFUSED:
                self._tell(ConnectionState.STOPPED, "")

    def _tell(self, state: ConnectionState, reason: str) -> None:
        self.reason = reason
        if state is not self._state:
            self._state = state
            self.connectionChanged.emit(state.value)

    async def _hand_on(self) -> None:
        """Batch by batch, each after the one before was handled. Events at once, records at most every `PAINT_EVERY_S`."""
        inbox = self._stream.inbox
        painted_at = 0.0
        while True:
            await inbox.has_news.wait()
            pause_s = painted_at + PAINT_EVERY_S - time.monotonic()
            if pause_s <= 0 and not inbox.due:
                inbox.begin_round()
                painted_at = time.monotonic()
            if not inbox.due and not inbox.events:
                await inbox.wait_for_events(pause_s)
                continue
            self._emit_events(inbox)
            for _ in range(min(len(inbox.due), MAX_RUNS_AT_ONCE)):
                self.runUpdated.emit(inbox.take_run())
            self._is_handled.clear()
            self._handed_on.emit()
            await self._is_handled.wait()

    def _emit_events(self, inbox: Inbox) -> None:
        num_events = 0
        while inbox.events and num_events < MAX_EVENTS_AT_ONCE:
            events = inbox.take_events()
            num_events += len(events.events)
            self.eventsReceived.emit(events)

    @Slot()
    def _note_handled(self) -> None:
        """In the thread of the slots, after all of them."""
        self.call_soon(self._is_handled.set)


def _home_or_address(text: Path | str | None) -> tuple[Path | str | None, str]:
    """(home, address): a text that ends like `host:7070` is an address, everything else a folder."""
    if isinstance(text, str) and _ADDRESS.fullmatch(text):
        return None, text
    return text, ""
