"""Removes ended runs, and checkpoints, code and caches that are not needed any more.

A run is removed in this order: its folder is renamed into the trash, its record and its metric points are deleted, the
files are deleted. After a crash before the rename nothing has happened. After a crash later, the next daemon completes
the removal before it serves. So no folder is left that a later run of the same id could use.

A run stays if it has not ended, if a run that stays was resumed from it, if an unfinished run uses a file in its folder,
or if its events have not all reached the logs and the event bus. A folder of another submission under its id is not
deleted but moved aside.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gen_worker.contract.checkpoints.choice import scan
from gen_worker.contract.checkpoints.retention import candidate_of, select_removals
from gen_worker.contract.files.durable import sync_path
from trn.core.errors import ConflictError, TrnError
from trn.core.home import Home
from trn.core.runs import RunRecord
from trn.core.snapshots import collect_garbage
from trn.daemon.ingest.artifact_intake import record_gone
from trn.daemon.serving.model_store import ModelStore
from trn.executors.base import Worker
from trn.executors.run_folders import find_foreign, set_aside
from trn.registry.base import Registry
from trn.registry.metrics import Extremes, MetricStore
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.upkeep.removal")

LOGS, BUS = "logs", "bus"  # consumers of the outbox
CACHES = ("decoded", "inputs")
DEFAULT_METRICS = ("val/loss", "train/loss")
DELIVERY_TIMEOUT_S, DELIVERY_POLL_S = 10.0, 0.1
_SEPARATOR = "~"  # not part of any run id


class Freed(NamedTuple):
    """Something that was removed, or would be."""

    kind: str  # run, checkpoint, snapshots, model, cache
    name: str
    size_bytes: int


class Pruned(NamedTuple):
    freed: list[Freed]
    kept: list[str]  # old runs that stay, each with the reason


class PruneRule(NamedTuple):
    """Which runs are old, and how many of the best are kept."""

    ended_before_ms: int
    keep_best: int = 0
    metric: str = ""
    is_max_best: bool = False


class Removal:
    """One removal at a time. From the loop's thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        metrics: MetricStore,
        home: Home,
        cache_dir: Path,
        consumers: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._home = home
        self._cache_dir = cache_dir
        self._consumers = consumers
        self._clock = clock
        self._turn = asyncio.Lock()
        # An unknown worker in the folder of that run.
        self.worker_in: Callable[[str], Worker | None] = lambda _run_id: None

    async def complete(self) -> None:
        """Complete the removals of an earlier daemon that was killed. Before the daemon serves."""
        left = await asyncio.to_thread(_list_folder, self._home.trash)
        for path in left:
            run_id = path.name.partition(_SEPARATOR)[0]
            logger.info("completing the removal of run %s", run_id)
            with contextlib.suppress(TrnError):  # already deleted, or the id is used again
                if not self._home.run(run_id).root.exists():
                    await self._forget([run_id])
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        # Points are synced late: a power cut may bring back those of a removed run.
        known = self._metrics.run_ids()
        gone = [run_id for run_id in known if not self._registry.has(run_id)]
        if gone:
            await committed(self._metrics.remove(gone))

    async def remove(self, run_ids: Sequence[str], *, is_dry_run: bool = False) -> list[Freed]:
        """Remove these runs. ConflictError with all reasons if one must stay; then nothing is removed."""
        async with self._turn:
            wanted = list(dict.fromkeys(run_ids))
            reasons = await self._find_reasons(wanted)
            if reasons:
                raise ConflictError("\n  - ".join(["nothing was removed", *reasons.values()]))
            sizes = await asyncio.to_thread(self._measure, wanted)
            if not is_dry_run:
                await self._remove(wanted)
            return sizes

    async def prune(self, rule: PruneRule, *, is_dry_run: bool = False) -> Pruned:
        """Remove old runs that are not needed, then superseded checkpoints of those that stay, code and caches."""
        async with self._turn:
            old = self._registry.ended_before(rule.ended_before_ms)
            kept = await asyncio.to_thread(self._keep_best, old, rule)
            wanted = [run.run_id for run in old if run.run_id not in kept]
            while reasons := await self._find_reasons(wanted):
                kept |= reasons  # the next round keeps its parent
                wanted = [run_id for run_id in wanted if run_id not in reasons]
            staying = [run.run_id for run in old if run.run_id in kept]
            needed = set(self._registry.resume_paths())
            superseded = await asyncio.to_thread(self._find_superseded, staying, needed)
            freed = await asyncio.to_thread(self._measure, wanted)
            freed += [checkpoint for checkpoint, _ in superseded]
            if not is_dry_run:
                await self._remove(wanted)
                await asyncio.to_thread(_delete, [path for _, files in superseded for path in files])
                for run_id in staying if superseded else ():
                    await record_gone(self._registry, self._home, run_id)
            snapshots = self._registry.snapshots(without=wanted)
            freed += await asyncio.to_thread(self._collect_snapshots, snapshots, is_dry_run=is_dry_run)
            models = self._registry.models_in_use()
            freed += await asyncio.to_thread(self._collect_models, models, is_dry_run=is_dry_run)
            if not self._registry.has_unfinished():  # a live run may be about to use a cache
                freed += await asyncio.to_thread(
                    self._clear_caches, rule.ended_before_ms / 1000, is_dry_run=is_dry_run
                )
            return Pruned(freed, list(kept.values()))

    async def _find_reasons(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Why runs must stay, by run id."""
        reasons: dict[str, str] = {}
        for run_id in run_ids:
            run = self._registry.get(run_id)
            if not run.state.is_terminal:
                reasons[run_id] = f"{run_id} is {run.state}: cancel it with `trn cancel {run_id}`"
            elif worker := self.worker_in(run_id):
                reasons[run_id] = f"{run_id}: {worker}, which is not in the registry, works in its folder"
        for child, parent in self._registry.children(run_ids):
            reasons.setdefault(parent, f"{parent}: run {child} was resumed from it; remove that run too")
        unfinished = self._registry.unfinished_configs()
        for run_id in run_ids:
            folder = f"{self._home.run(run_id).root}/"
            for other, config in unfinished.items():
                if other != run_id and folder in config:
                    reason = f"{run_id}: run {other} has not ended and uses a file in its folder"
                    reasons.setdefault(run_id, reason)
        for run_id in run_ids:
            if run_id not in reasons and (late := await self._wait_delivered(run_id)):
                reasons[run_id] = f"{run_id}: its last events have not reached {late} yet; try again later"
        return reasons

    async def _wait_delivered(self, run_id: str) -> str:
        """The consumers that do not have all its events. Waits: after the end of a run they get them soon."""
        deadline = self._clock() + DELIVERY_TIMEOUT_S
        while late := self._registry.not_told(run_id, self._consumers):
            if self._clock() >= deadline:
                return " and ".join({LOGS: "the logs", BUS: "the event bus"}.get(name, name) for name in late)
            await asyncio.sleep(DELIVERY_POLL_S)
        return ""

    async def _remove(self, run_ids: Sequence[str]) -> None:
        runs = [self._registry.get(run_id) for run_id in run_ids]
        moved = await asyncio.to_thread(self._move_away, runs)
        try:
            await self._forget(run_ids)
        except TrnError:
            await asyncio.to_thread(_move_back, moved)
            raise
        for path in moved:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _forget(self, run_ids: Sequence[str]) -> None:
        await committed(self._registry.remove(run_ids))
        await committed(self._metrics.remove(run_ids))

    def _move_away(self, runs: Sequence[RunRecord]) -> dict[Path, Path]:
        """{path in the trash: path before}."""
        self._home.trash.mkdir(mode=0o700, exist_ok=True)
        moved = {}
        for run in runs:  # first, because it may refuse
            if find_foreign(self._home.run(run.run_id), run.nonce):
                set_aside(self._home, run.run_id)
        for run in runs:
            folder = self._home.run(run.run_id).root
            place = self._home.trash / f"{run.run_id}{_SEPARATOR}{secrets.token_hex(4)}"
            with contextlib.suppress(FileNotFoundError):
                folder.rename(place)
                moved[place] = folder
        sync_path(self._home.trash)
        return moved

    def _measure(self, run_ids: Iterable[str]) -> list[Freed]:
        return [Freed("run", run_id, size_of(self._home.run(run_id).root)) for run_id in run_ids]

    def _keep_best(self, old: Sequence[RunRecord], rule: PruneRule) -> dict[str, str]:
        """The best runs of each trainer class, with the reason."""
        if not rule.keep_best:
            return {}
        judged: dict[str, list[tuple[float, str, str]]] = {}
        for run in old:
            found = _best_value(self._metrics.extremes(run.run_id), rule)
            if found is not None:
                value, metric = found
                order = -value if rule.is_max_best else value
                judged.setdefault(str(run.config.get("trainer")), []).append((order, run.run_id, metric))
        kept, which = {}, "the best" if rule.keep_best == 1 else f"among the {rule.keep_best} best"
        for trainer, runs in judged.items():
            for order, run_id, metric in sorted(runs)[: rule.keep_best]:
                value = -order if rule.is_max_best else order
                kept[run_id] = f"{run_id}: {which} of {trainer} ({metric} {value:.6g})"
        return kept

    def _find_superseded(self, run_ids: Sequence[str], needed: set[str]) -> list[tuple[Freed, list[Path]]]:
        """Checkpoints, with their files, that are neither newest nor best, and that no run was resumed from."""
        found = []
        for run_id in run_ids:
            folder = self._home.run(run_id).checkpoints
            scanned = scan(folder)[0] if folder.is_dir() else []
            infos = {info.stem: info for info in scanned if info.meta.run_id == run_id}
            candidates = [candidate_of(info) for info in infos.values()]
            for stem in select_removals(candidates, keep_last=1, keep_best=1):
                meta = infos[stem].meta
                names = [item.name for item in meta.files] + ([meta.author_dir] if meta.author_dir else [])
                # The meta is deleted first: without it the other files do not count as a checkpoint.
                files = [infos[stem].meta_path, *(folder / name for name in names)]
                if str(files[0]) not in needed:
                    found.append((Freed("checkpoint", f"{run_id} {stem}", sum(map(size_of, files))), files))
        return found

    def _collect_snapshots(self, keep: set[str], *, is_dry_run: bool) -> list[Freed]:
        """Code snapshots that no run uses."""
        found = collect_garbage(self._home.snapshots, keep, is_dry_run=is_dry_run)
        if not found.freed_bytes:
            return []
        return [Freed("snapshots", f"{found.num_manifests} code snapshots", found.freed_bytes)]

    def _collect_models(self, needed: Sequence[str], *, is_dry_run: bool) -> list[Freed]:
        """Models that no run serves, predicts with, begins at or was promoted to."""
        unused = ModelStore(self._home.models, self._home.snapshots).unused(needed)
        freed = [Freed("model", path.name, size_of(path)) for path in unused]
        if not is_dry_run:
            _delete(unused)
        return freed

    def _clear_caches(self, before_s: float, *, is_dry_run: bool) -> list[Freed]:
        """Delete what was not used since then."""
        unused = _unused(self._cache_dir, before_s)
        freed = [Freed("cache", str(path), size_of(path)) for path in unused]
        if not is_dry_run:
            _delete(unused)
        return freed


def _best_value(extremes: Mapping[str, Extremes], rule: PruneRule) -> tuple[float, str] | None:
    for metric in (rule.metric,) if rule.metric else DEFAULT_METRICS:
        found = extremes.get(metric)
        value = None if found is None else found.max_value if rule.is_max_best else found.min_value
        if value is not None and math.isfinite(value):
            return value, metric
    return None


def _unused(cache_dir: Path, before_s: float) -> list[Path]:
    """Cache entries that were last used before then."""
    found = []
    for kind in CACHES:
        for path in _list_folder(cache_dir / kind):
            with contextlib.suppress(OSError):
                if _newest_use(path) < before_s:
                    found.append(path)
    return found


def _newest_use(path: Path) -> float:
    """When its files were last read or written. For folders only the write time counts: listing changes the other."""
    found = [item.lstat() for item in (path, *(path.rglob("*") if path.is_dir() else ()))]
    return max(
        float(item.st_mtime if stat.S_ISDIR(item.st_mode) else max(item.st_mtime, item.st_atime))
        for item in found
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 if it does not exist."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size
        return sum(size_of(Path(entry.path)) for entry in os.scandir(path))
    except OSError:
        return 0


def _list_folder(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _move_back(moved: Mapping[Path, Path]) -> None:
    for place, folder in moved.items():
        place.rename(folder)
