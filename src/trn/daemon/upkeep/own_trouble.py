"""Trouble of the daemon itself: what it is, and how it is waited out.

No worker is ended and no run is failed for it. It passes, or somebody mends it; until then the same is tried again.
"""

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from trn.core.errors import RegistryError, UnavailableError
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.dispatch.supervisor")

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 10.0
MAX_TRIES = 4  # of a step that may be left out
STEP_TIMEOUT_S = 120.0
# Of descriptors, memory and buffers.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def is_own_trouble(fault: BaseException) -> bool:
    """Whether it says nothing of a run: a lack of descriptors or memory, or a registry that cannot be read."""
    if isinstance(fault, RegistryError | sqlite3.Error | MemoryError):
        return True
    return isinstance(fault, OSError) and fault.errno in SHORTAGES


class Pause:
    """Between one try and the next: twice as long each time, from the beginning after a success."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def reset(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def lengthen(self) -> float:
        """How long it is this time."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_PAUSE_S)
        return pause_s

    async def rest(self) -> None:
        await asyncio.sleep(self.lengthen())


async def insist(who: object, what: str, action: Callable[[], Awaitable[T]]) -> T:
    """Until it is done. Only trouble of our own is waited out; other faults are raised."""
    pause = Pause()
    while True:
        try:
            return await action()
        except Exception as fault:
            if not is_own_trouble(fault):
                raise
            logger.error("%s: could not %s, trying again: %s", who, what, fault)  # noqa: TRY400
        await pause.rest()


async def try_step(
    who: object, what: str, action: Callable[[], Awaitable[T]], *, num_tries: int = MAX_TRIES
) -> T | None:
    """A step that the run's end must not hang on: until it does not say False, a few times, then without it.

    Trouble of our own does not count as a try.
    """
    pause = Pause()
    while num_tries > 0:
        num_tries -= 1
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                result = await action()
            if result is not False:
                return result
        except Exception as fault:
            logger.exception("%s: could not %s", who, what)
            num_tries += is_own_trouble(fault)
        await pause.rest()
    return None


async def record(who: object, change: Callable[[], "Future[T]"]) -> T:
    """A change of the registry. Where it cannot be written there is nothing to do but to try again."""
    pause = Pause()
    while True:
        try:
            return await committed(change())
        except (UnavailableError, RegistryError) as fault:
            logger.error("%s: not recorded, trying again: %s", who, fault)  # noqa: TRY400
        await pause.rest()
