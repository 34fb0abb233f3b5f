"""Retries after faults of the daemon itself: no descriptors, no memory, a registry that cannot be read or written.

Such a fault says nothing about a run. No worker is killed and no run fails because of it; the step is tried again.
"""

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from gen_worker.contract.doubling_delay import DoublingDelay
from trn.core.errors import RegistryError, UnavailableError
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.dispatch.supervisor")

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 10.0
MAX_TRIES = 4  # of a step that may be skipped
STEP_TIMEOUT_S = 120.0
# Of descriptors, memory and buffers.
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN})


def is_daemon_fault(fault: BaseException) -> bool:
    """Whether it is a shortage of the daemon, or a registry that cannot be read."""
    if isinstance(fault, RegistryError | sqlite3.Error | MemoryError):
        return True
    return isinstance(fault, OSError) and fault.errno in SHORTAGES


class Pause(DoublingDelay):
    def __init__(self) -> None:
        super().__init__(FIRST_PAUSE_S, MAX_PAUSE_S)

    async def rest(self) -> None:
        await asyncio.sleep(self.next_s())


async def retry_until_done(who: object, what: str, action: Callable[[], Awaitable[T]]) -> T:
    """Retry after faults of the daemon; other faults are raised."""
    pause = Pause()
    while True:
        try:
            return await action()
        except Exception as fault:
            if not is_daemon_fault(fault):
                raise
            logger.error("%s: could not %s: %s; will try again", who, what, fault)  # noqa: TRY400
        await pause.rest()


async def commit_until_done(who: object, change: Callable[[], "Future[T]"]) -> T:
    """Commit a change of the registry; retry while it cannot be written."""
    pause = Pause()
    while True:
        try:
            return await committed(change())
        except (UnavailableError, RegistryError) as fault:
            logger.error("%s: not recorded: %s; will try again", who, fault)  # noqa: TRY400
        await pause.rest()


async def try_step(
    who: object, what: str, action: Callable[[], Awaitable[T]], *, num_tries: int = MAX_TRIES
) -> T | None:
    """A step that the run's end must not wait for: tried until it does not return False, a few times, then skipped.

    A fault of the daemon does not count as a try.
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
            num_tries += is_daemon_fault(fault)
        await pause.rest()
    return None
