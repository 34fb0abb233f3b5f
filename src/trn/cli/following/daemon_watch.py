"""Notices that no daemon answers, reports it, and waits up to two minutes for one.

A daemon that died is replaced. After `trn daemon stop` it waits for the user to start one, unless it needs one itself.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trn.cli.output import say
from trn.core.errors import UnavailableError

if TYPE_CHECKING:
    from trn.client.client import AsyncClient
    from trn.client.daemon_start import RunningDaemon
    from trn.core.home import Home

LOST_PATIENCE_S, PAUSE_S = 120.0, 0.2
ANSWER_PATIENCE_S, ASK_EVERY_S = 5.0, 10.0
IDLE_EXIT_S = 600.0

T = TypeVar("T")


class Absence(NamedTuple):
    """Why no daemon answers, and what to do about it; no remedy if none is needed."""

    what: str
    remedy: str = ""


async def start_daemon(home: "Home") -> "RunningDaemon":
    """Wait until the home has a daemon; one that is started here exits when it is idle."""
    from trn.client.daemon_start import ensure_daemon

    daemon, _ = await asyncio.to_thread(ensure_daemon, home, idle_exit_s=IDLE_EXIT_S)
    return daemon


def say_absence(absence: Absence | None) -> None:
    """On stderr, if the user has to do something."""
    if absence is not None and absence.remedy:
        say(f"trn: {absence.what}; runs continue meanwhile: {absence.remedy}")


class DaemonWatch:
    """Watches the home's daemon for one command and all of its streams. Belongs to one event loop.

    `tell` is called once for each absence, and with None when it is over.
    """

    def __init__(
        self,
        client: "AsyncClient",
        home: "Home",
        tell: Callable[[Absence | None], None] = say_absence,
        *,
        lost_patience_s: float = LOST_PATIENCE_S,
    ) -> None:
        client.patience_s = 0.0  # we retry, and report it
        self.absence: Absence | None = None
        self._client, self._home, self._tell = client, home, tell
        self._lost_patience_s = lost_patience_s
        self._is_needed = False
        self._asking = asyncio.Lock()

    def need(self) -> None:
        """Something must be recorded: start a daemon even if it was stopped on purpose."""
        self._is_needed = True

    async def following(self, again: Callable[[], AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
        """The items of a stream, across restarts of the daemon; `again` reopens it where it broke off."""
        lost_s: float | None = None
        while True:
            try:
                async with aclosing(again()) as stream:
                    async for item in stream:
                        lost_s = None
                        yield item
            except UnavailableError:
                lost_s = lost_s or time.monotonic()
                await self._regain()
                if time.monotonic() - lost_s > self._lost_patience_s:
                    raise  # it answers, but refuses this call
                await asyncio.sleep(PAUSE_S)  # a stopping daemon still answers
            else:
                return

    async def watch_over(self) -> None:
        """Endless: also notice a daemon that hangs, whose streams are silent."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            await self._regain()

    async def explain(self) -> Absence:
        """Why no daemon carried out a request, as far as it is known."""
        from trn.client.daemon_start import find_daemon, silence_of

        if self.absence is not None and self.absence.remedy:
            return self.absence
        daemon = await asyncio.to_thread(find_daemon, self._home)
        return Absence("no daemon answers") if daemon is None else Absence(*silence_of(daemon))

    async def _regain(self) -> None:
        """Wait until a daemon answers. UnavailableError if none can be started, or none answers for too long."""
        async with self._asking:  # once for all streams
            begun_s = time.monotonic()
            listened_s: float | None = None
            while not await self._answers():
                listened_s = await self._look(listened_s)
                if time.monotonic() - begun_s > self._lost_patience_s:
                    raise UnavailableError(self._give_up())
                await asyncio.sleep(PAUSE_S)
            self._note(None)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_PATIENCE_S):
                await self._client.health()
        except (UnavailableError, TimeoutError):
            return False
        return True

    async def _look(self, listened_s: float | None) -> float | None:
        """Find out why none answers, and start one if needed. Returns since when one listens without answering."""
        from trn.client.daemon_start import find_daemon, is_ending, name_start, silence_of

        daemon = await asyncio.to_thread(find_daemon, self._home)
        if daemon is not None:
            listened_s = listened_s or time.monotonic()
            if time.monotonic() - listened_s > ANSWER_PATIENCE_S:  # it may just have started
                self._note(Absence(*silence_of(daemon)))
            return listened_s
        if is_ending(self._home):
            self._note(self.absence or Absence("the daemon is stopping"))
        elif self._is_needed or self._home.daemon_info.exists():  # else it stopped on purpose
            self._note(Absence("no daemon runs, one is being started"))
            await start_daemon(self._home)
        else:
            self._note(Absence("the daemon was stopped", f"`{name_start(self._home)}` starts it again"))
        return None

    def _note(self, absence: Absence | None) -> None:
        before, self.absence = self.absence, absence
        if absence != before:
            self._tell(absence)

    def _give_up(self) -> str:
        what, remedy = self.absence or Absence("no daemon answers", "")
        how = f": {remedy}" if remedy else ""
        return f"no daemon has answered for {self._lost_patience_s:g} s, {what}{how}"
