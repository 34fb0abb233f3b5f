"""Ended runs whose metric points are not all in the metric store: it failed, or a power cut took its last commits.

Such a run is not followed any more, so its events file is read once more. Points that an older release stored without
buckets get them here, too, while everything else goes on.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable

from trn.core.errors import NotFoundError, TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.daemon.ingest.followed_run import file_size
from trn.executors.base import FilesByPool
from trn.registry.base import Registry
from trn.registry.metrics import MetricStore, find_behind
from trn.registry.writer import committed

logger = logging.getLogger("trn.ingest")


class MetricBacklog:
    """From the loop's thread. `follow_once` ingests the rest of an ended run."""

    def __init__(
        self,
        registry: Registry,
        metrics: MetricStore,
        home: Home,
        files: FilesByPool,
        *,
        follow_once: Callable[[RunRecord], Awaitable[None]],
        retry_s: float,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._home = home
        self._files = files
        self._follow_once = follow_once
        self._retry_s = retry_s
        self._run_ids: set[str] = set()
        self._has_some = asyncio.Event()

    def add(self, run_id: str) -> None:
        """The store lacks points of that run, which is about to end or to wait for another attempt."""
        self._run_ids.add(run_id)
        self._has_some.set()

    async def run(self) -> None:
        """Until cancelled: the runs of an earlier daemon, then those that are added."""
        try:
            found = await asyncio.to_thread(find_behind, self._home.registry, self._home.metrics)
            self._run_ids.update(found)
        except sqlite3.Error:
            logger.exception("runs with missing metric points cannot be searched")
        while True:
            await self._catch_up()
            if not self._run_ids:
                self._has_some.clear()
            await self._has_some.wait()
            await asyncio.sleep(self._retry_s)

    async def build_buckets(self) -> None:
        """Of all points that have none."""
        try:
            while await committed(self._metrics.build_more()):
                pass
        except TrnError as fault:  # charts are slower without; the next daemon tries again
            logger.warning("metric points of older runs cannot be merged: %s", fault)

    async def _catch_up(self) -> None:
        waiting, self._run_ids = self._run_ids, set()
        for run_id in waiting:
            try:
                run = self._registry.get(run_id)
                if not run.state.is_terminal:
                    self._run_ids.add(run_id)  # its next attempt may do it
                elif self._has_events(run):
                    await self._follow_once(run)
            except NotFoundError:
                continue
            except Exception:
                logger.exception("metric points of run %s cannot be stored; will try again", run_id)
                self._run_ids.add(run_id)

    def _has_events(self, run: RunRecord) -> bool:
        """False: its file is gone."""
        return file_size(self._files.of(run.needs.pool).events(run.run_id)) >= run.event_offset
