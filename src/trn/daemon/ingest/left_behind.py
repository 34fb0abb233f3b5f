"""Ended runs of which the metric store has not all points: it refused while they ended, or a power cut took its last
commits. Nobody follows such a run any more, so it is followed once more, from its file.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable

from trn.core.errors import NotFoundError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.ingest.followed_run import file_size
from trn.registry.base import Registry
from trn.registry.metrics import find_behind

logger = logging.getLogger("trn.ingest")


class LeftBehind:
    """Belongs to the loop's thread. `follow_once` takes in what is left of an ended run."""

    def __init__(
        self,
        registry: Registry,
        home: Home,
        *,
        follow_once: Callable[[RunRecord], Awaitable[None]],
        again_s: float,
    ) -> None:
        self._registry = registry
        self._home = home
        self._follow_once = follow_once
        self._again_s = again_s
        self._run_ids: set[str] = set()
        self._has_some = asyncio.Event()

    def add(self, run_id: str) -> None:
        """The store has yet to get points of that run, which is about to end, or to wait for another attempt."""
        self._run_ids.add(run_id)
        self._has_some.set()

    async def run(self) -> None:
        """Until cancelled: what a daemon before us left, then what is added, each after a while."""
        try:
            found = await asyncio.to_thread(find_behind, self._home.registry, self._home.metrics)
            self._run_ids.update(found)
        except sqlite3.Error:
            logger.exception("which runs are left without points could not be found out")
        while True:
            await self._look()
            if not self._run_ids:
                self._has_some.clear()
            await self._has_some.wait()
            await asyncio.sleep(self._again_s)

    async def _look(self) -> None:
        waiting, self._run_ids = self._run_ids, set()
        for run_id in waiting:
            try:
                run = self._registry.get(run_id)
                if not run.state.is_terminal:
                    self._run_ids.add(run_id)  # its next attempt sees to it, if there is one
                elif (
                    file_size(self._home.run(run_id).events) >= run.event_offset
                ):  # else it is not there any more
                    await self._follow_once(run)
            except NotFoundError:
                continue
            except Exception:
                logger.exception("points of run %s cannot be stored; will try again", run_id)
                self._run_ids.add(run_id)
