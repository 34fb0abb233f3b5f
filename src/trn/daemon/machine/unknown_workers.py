"""Workers and run folders that are not in the registry, for example after an older backup was restored.

Such a worker still trains and uses its devices. It keeps them until it exits, a warning names it, and no run is started
in its folder. It is not killed: its result may be worth more than the slot. One of another pool holds nothing here.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.core.runs import LOCAL_POOL, RunRecord
from trn.executors.base import FoundWorker, Worker
from trn.executors.pools import Pools
from trn.registry.base import ReadableRegistry

logger = logging.getLogger("trn.daemon.unknown")

MAX_NAMED = 5


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What all unknown workers use."""

    devices: Mapping[str, str] = {}  # device -> worker, in words
    cpus: int = 0
    memory_mb: int = 0

    def reason_of(self, device_id: str) -> str:
        """Why the device is not free; empty if none of them uses it."""
        worker = self.devices.get(device_id)
        return "" if worker is None else f"in use by {worker}, a worker that is not in the registry"


class UnknownWorkers:
    """Searched once, at the start; then checked until the last has exited. From the loop's thread."""

    def __init__(self, *, registry: ReadableRegistry, pools: Pools, home: Home) -> None:
        self._registry = registry
        self._pools = pools
        self._home = home
        self._workers: dict[tuple[str, Worker], FoundWorker] = {}  # by pool and worker
        self._folders: list[str] = []
        self._moved: dict[str, Path] = {}
        self.held = Held()

    async def look(self) -> None:
        """Search. Before anything is dispatched."""
        await self.look_again(is_first=True)
        names = await asyncio.to_thread(_list_names, self._home.runs)
        self._folders = self._registry.unknown_ids(names)
        for warning in self.warnings:
            logger.warning("%s", warning)

    async def look_again(self, *, is_first: bool = False) -> None:
        """Forget those that have exited. Costs nothing if there are none."""
        if not self._workers and not is_first:
            return
        known = self._workers
        unknown: dict[tuple[str, Worker], FoundWorker] = {}
        for pool in self._pools.names:
            try:
                unknown |= await self._find(pool)
            except (OSError, UnavailableError):  # says nothing about its workers
                logger.exception("live workers of the pool %s cannot be listed", pool)
                unknown |= {key: worker for key, worker in known.items() if key[0] == pool}
        if not is_first:  # later ones were started by this daemon
            unknown = {key: worker for key, worker in unknown.items() if key in known}
        for key in known.keys() - unknown.keys():
            logger.info("%s of run %s has exited", key[1], known[key].run_id)
        self._workers = unknown
        here = [worker for (pool, _), worker in unknown.items() if pool == LOCAL_POOL]
        self.held = Held(
            devices={device: str(worker.worker) for worker in here for device in worker.devices},
            cpus=sum(worker.cpus for worker in here),
            memory_mb=sum(worker.memory_mb for worker in here),
        )

    async def _find(self, pool: str) -> dict[tuple[str, Worker], FoundWorker]:
        found = await self._pools.of(pool).find_workers()
        live = {run.run_id: run for run in self._registry.live() if run.needs.pool == pool}
        return {(pool, worker.worker): worker for worker in found if not self._is_known(worker, live)}

    def worker_in(self, run_id: str) -> Worker | None:
        """An unknown worker in that run's folder."""
        found = (worker.worker for worker in self._workers.values() if worker.run_id == run_id)
        return next(found, None)

    def note_moved(self, run_id: str, target: Path) -> None:
        """A folder in the place of a new run's was moved."""
        logger.warning("run %s: the folder of another submission was moved to %s", run_id, target)
        self._moved[run_id] = target

    def _is_known(self, worker: FoundWorker, live: Mapping[str, RunRecord]) -> bool:
        run = live.get(worker.run_id)
        if run is None:
            return False
        if (worker.number, worker.nonce) == (run.attempt, run.nonce):
            return True
        attempt = next(item for item in self._registry.attempts(run.run_id) if item.number == run.attempt)
        return attempt.worker == worker.worker.ref

    @property
    def warnings(self) -> list[str]:
        said = [_say_worker(pool, worker) for (pool, _), worker in self._workers.items()]
        folders = [name for name in self._folders if name not in self._moved]
        if folders:
            said.append(_say_folders(self._home, folders))
        said += [
            f"the folder of an earlier run {run_id} was moved to {target}, because a new run has its id"
            for run_id, target in self._moved.items()
        ]
        return said


def _say_worker(pool: str, worker: FoundWorker) -> str:
    if pool != LOCAL_POOL:
        return (
            f"{worker.worker} of the pool {pool} is in the folder of run {worker.run_id}, but it is not in the"
            " registry. No run is started there until it exits"
        )
    pid = worker.worker.pid
    what = [*worker.devices, f"{worker.cpus} CPU{'s' if worker.cpus != 1 else ''}"]
    return (
        f"process {pid} is a worker in the folder of run {worker.run_id}, but it is not in the registry. It uses"
        f" {', '.join(what)} until it exits (`kill {pid}` stops it)"
    )


def _say_folders(home: Home, names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return (
        f"folders in {home.runs} without a run in the registry: {shown}{more}. Their runs are newer than a restored"
        " backup, or from another home. `trn resume --checkpoint` continues from their checkpoints"
    )


def _list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
