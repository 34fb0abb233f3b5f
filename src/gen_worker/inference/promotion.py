"""What a server answers with, and how that changes: by the documents of `contract.serving`.

```text
wanted.json ──> checked ──> loaded, probed ──> gated ──> live.json ──> switched ──> event ──> old workers drained
                   └──────────────┴──────────────┴─ refused: live.json (number only), event; the old version answers
```

Invariants
- `live.json` is the commit. Once the new version has answered a request, a server that starts again begins with it.
- Nothing after the commit can refuse. Until then nothing that clients see has changed.
- No promotion ends the server: an error that nobody thought of is a refusal, too.
- A version that answers has passed its gate. One that only shadows need not.
- A number is finished once. Its event is written again if a crash leaves open whether it was durable.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.durable import Sync
from gen_worker.contract.job.model_version import ModelVersion, VersionFacts
from gen_worker.contract.job.spec import GateSpec
from gen_worker.contract.serving import (
    LIVE,
    LiveModel,
    PromotedEvent,
    PromotionRefusedEvent,
    WantedModel,
    read_wanted,
    write_document,
)
from gen_worker.errors import NEWS_LOGGER, CheckpointError, ModelLoadError, StartupError
from gen_worker.inference.front.front import Front
from gen_worker.inference.front.pool import NotReadyError, ReplicaPool
from gen_worker.inference.gate import RefusedError, require_columns, require_latency, require_metric
from gen_worker.inference.memory import find_shortage
from gen_worker.inference.messages import NotReady
from gen_worker.inference.versions import read_checkpoint, read_if_there

logger, news = logging.getLogger("gen_worker.inference"), logging.getLogger(NEWS_LOGGER)

LOOK_EVERY_S = 0.2
LOAD_S = 1800.0  # from the launch of a version to its answers to probe rows
DRAIN_S = 600.0  # for streams of a version that was replaced

Outcome = PromotedEvent | PromotionRefusedEvent
Compare = Callable[[ReplicaPool, ReplicaPool, dict[str, Any]], Awaitable[None]]


class Promotions:
    """Of one server. All of it is of the loop's thread; `look` is called by one task."""

    def __init__(
        self,
        *,
        folder: Path,
        live: LiveModel,
        gate: GateSpec,
        front: Front,
        make_pool: Callable[[ModelVersion], ReplicaPool],
        retire: Callable[[VersionFacts], None],
        tell: Callable[[Outcome], Awaitable[None]],
        compare: Compare | None = None,
        switched: Callable[[ModelVersion], None] = lambda _version: None,
    ) -> None:
        """`tell` returns once the event is durable. `compare` raises a RefusedError for a new pool that does worse than
        the live one on the newest feedback.
        """
        self.live = live
        self._folder = folder
        self._gate = gate
        self._front = front
        self._make_pool = make_pool
        self._retire = retire
        self._tell = tell
        self._compare = compare
        self._switched = switched
        self._pool: ReplicaPool | None = None
        self._second: ReplicaPool | None = None
        self._finished = live.number  # also where that could not be written
        self._is_unreadable = False
        self._is_committing = False
        self._warm: set[VersionFacts] = set()  # versions that were loaded
        self._opening: VersionFacts | None = None  # one of them, which is not served yet
        self._drains: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Task[None] | None = None  # of what was committed last
        self._is_told = False  # the outcome in `live.json`

    @property
    def pool(self) -> ReplicaPool:
        assert self._pool is not None, "it was not opened"
        return self._pool

    async def open(self) -> None:
        """Load what is served, and give it to the front. ModelLoadError where it cannot be loaded, and no other version that
        can was asked for meanwhile.
        """
        live = self.live
        try:
            self._pool = await self._open_pool(live.version)
            if self._is_new:
                require_latency(self._gate, self.pool.ready, {})
        except (NotReadyError, RefusedError) as why:
            fault = ModelLoadError(f"{live.version.label} cannot be served: {why.words}")
            if isinstance(why, NotReadyError):
                fault.cause = why.cause  # a kill is not the author's fault
            if await self._open_wanted():
                return
            raise fault from None
        self._front.switch(self.pool)
        if live.second is not None:
            try:
                self._second = await self._open_pool(live.second)
            except NotReadyError as why:
                logger.warning("%s is not served beside it any more: %s", live.second.label, why.words)
                live = msgspec.structs.replace(live, second=None, second_is="", percent=0.0)
        self._show_second(live)
        self.live = live  # written with the URL
        await self._tell_outcome()

    async def _open_wanted(self) -> bool:
        """Answer with what is wanted in the place of a version that cannot be loaded any more. False where that is nothing, or
        was refused. There is no model to compare columns and answers with.
        """
        try:
            wanted = await asyncio.to_thread(read_wanted, self._folder)
        except StartupError:
            return False
        if (
            wanted is None
            or wanted.number <= self._finished
            or wanted.action not in ("promote", "rollback")
            or (wanted.version is not None and wanted.version.facts == self.live.version.facts)
        ):
            return False
        self._finished = wanted.number
        gate = (wanted.gate or self._gate) if wanted.action == "promote" else None
        figures: dict[str, Any] = {}
        pool = None
        try:
            version = self._version_of(wanted)
            await asyncio.to_thread(self._check, version, gate, figures)
            with self._keeping(version):
                pool = await self._open_pool(version)
                if gate is not None:
                    require_latency(gate, pool.ready, figures)
                await self._commit(wanted, version, pool, figures)
        except (NotReadyError, RefusedError) as why:
            if pool is not None:
                await pool.close()
            refused = why if isinstance(why, RefusedError) else RefusedError(why.category, why.words)
            await self._refuse(wanted, refused, figures)
            return False
        return True

    @property
    def _is_new(self) -> bool:
        return not (self._folder / LIVE).exists()

    async def note_url(self, url: str) -> None:
        """The next attempt answers there, too, if it can. What is served is durable when this returns, as is all that was written
        into the folder before.
        """
        await self._write(msgspec.structs.replace(self.live, url=url), sync="folder")

    async def look(self) -> None:
        """Do what is wanted, unless it is done. Nothing is raised for a version that is refused."""
        wanted = await self._read_wanted()
        if wanted is None or wanted.number <= self._finished:
            await self._forget_outcome()
            return
        figures: dict[str, Any] = {}
        self._is_committing = False
        try:
            if not await self._do_unless_replaced(wanted, figures):
                logger.warning("%s %d was replaced before it was done", wanted.action, wanted.number)
        except RefusedError as why:
            await self._refuse(wanted, why, figures)
        except Exception as fault:
            if self.live.number == wanted.number:  # it is committed
                raise
            logger.exception("%s %d failed", wanted.action, wanted.number)
            words = f"it failed with {type(fault).__name__}; the log of the server has the details"
            await self._refuse(wanted, RefusedError("error", words), figures)
        self._finished = wanted.number

    async def close(self) -> None:
        """End all model workers. What is not answered is refused."""
        tasks = [*self._drains, *([] if self._telling is None else [self._telling])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._forget_outcome()
        for pool in (self._pool, self._second):
            if pool is not None:
                await pool.close()

    # One wanted document.

    async def _read_wanted(self) -> WantedModel | None:
        try:
            wanted = await asyncio.to_thread(read_wanted, self._folder)
        except StartupError as fault:
            if not self._is_unreadable:
                logger.warning("nothing is promoted: %s", fault)
            self._is_unreadable = True
            return None
        self._is_unreadable = False
        return wanted

    async def _do_unless_replaced(self, wanted: WantedModel, figures: dict[str, Any]) -> bool:
        """False where another one is wanted before this one is committed: a version that hangs keeps no other out."""
        work = asyncio.get_running_loop().create_task(self._do(wanted, figures))
        try:
            while not (await asyncio.wait([work], timeout=LOOK_EVERY_S))[0]:
                newest = None if self._is_committing else await self._read_wanted()
                if newest is not None and newest.number > wanted.number and not self._is_committing:
                    return False
            await work
            return True
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _do(self, wanted: WantedModel, figures: dict[str, Any]) -> None:
        if wanted.action == "single":
            await self._commit(wanted, self.live.version, self.pool, figures)
            return
        version = self._version_of(wanted)
        if wanted.action in ("promote", "rollback") and version.facts == self.live.version.facts:
            await self._commit(wanted, self.live.version, self.pool, figures)
            return
        if wanted.action == "split" and not 0 < wanted.percent <= 100:
            raise RefusedError(
                "request", f"percent is {wanted.percent:g}, expected more than 0 and at most 100"
            )
        gate = wanted.gate or self._gate
        is_measured = wanted.action in ("promote", "split")
        await asyncio.to_thread(self._check, version, gate if is_measured else None, figures)
        second = self._second
        is_there = second is not None and second.version.facts == version.facts
        with self._keeping(version):
            pool = second if second is not None and is_there else await self._open_or_refuse(version)
            try:
                failpoint("promotion.loaded")
                if wanted.action != "shadow":
                    require_columns(pool.ready, self.pool.ready)
                if is_measured:
                    require_latency(gate, pool.ready, figures)
                    if self._compare is not None:
                        await self._compare(pool, self.pool, figures)
                failpoint("promotion.gated")
                await self._commit(wanted, version, pool, figures)
            except BaseException:
                if pool not in (self._pool, self._second):
                    await pool.close()
                raise

    def _version_of(self, wanted: WantedModel) -> ModelVersion:
        if wanted.version is not None:
            return wanted.version
        if wanted.action != "rollback":
            raise RefusedError("request", "it names no version")
        if self.live.previous is None:
            raise RefusedError("request", "there is no version before the one that is served")
        return self.live.previous

    def _check(self, version: ModelVersion, gate: GateSpec | None, figures: dict[str, Any]) -> None:
        """What needs no model. Blocks."""
        try:
            info = read_checkpoint(version)
        except CheckpointError as fault:
            raise RefusedError("checkpoint", str(fault)) from None
        if gate is not None:
            require_metric(gate, info, read_if_there(self.live.version), figures)
        if version.facts not in self._warm:
            shortage = find_shortage(info)
            if shortage:
                raise RefusedError("memory", shortage)

    @contextlib.contextmanager
    def _keeping(self, version: ModelVersion) -> Iterator[None]:
        """Until it is committed or given up, that version stays loaded, whichever others end meanwhile."""
        self._opening = version.facts
        try:
            yield
        except BaseException:
            self._opening = None
            self._retire_unused()
            raise
        self._opening = None

    async def _open_or_refuse(self, version: ModelVersion) -> ReplicaPool:
        try:
            return await self._open_pool(version)
        except NotReadyError as why:
            raise RefusedError(why.category, why.words) from None

    async def _open_pool(self, version: ModelVersion) -> ReplicaPool:
        pool = self._make_pool(version)
        self._warm.add(version.facts)
        try:
            async with asyncio.timeout(LOAD_S):
                await pool.open()
        except BaseException as fault:
            self._warm.discard(version.facts)
            self._retire(version.facts)  # also one that is to be kept: its template may hang
            if isinstance(fault, TimeoutError):
                words = f"it is not ready after {LOAD_S:g} s"
                raise NotReadyError(NotReady(category="model-load", words=words)) from None
            raise
        return pool

    # Its outcome.

    async def _commit(
        self, wanted: WantedModel, version: ModelVersion, pool: ReplicaPool, figures: dict[str, Any]
    ) -> None:
        """Make it durable, then show it. RefusedError, and nothing changed, where the disk refuses."""
        was = self.live
        is_beside = wanted.action in ("shadow", "split")
        is_other = not is_beside and version.facts != was.version.facts
        live = msgspec.structs.replace(
            was,
            number=wanted.number,
            version=was.version if is_beside else version,
            previous=was.version if is_other else was.previous,
            second=version if is_beside else None,
            second_is=wanted.action if is_beside else "",
            percent=wanted.percent if wanted.action == "split" else 0.0,
        )
        outcome = PromotedEvent(
            number=wanted.number,
            version=live.version.facts,
            previous=was.version.facts if is_other else None,
            action=wanted.action,
            second=None if live.second is None else live.second.facts,
            percent=live.percent,
            by=wanted.by,
            gate=figures,
        )
        live = msgspec.structs.replace(live, outcome=outcome)
        self._is_committing = True  # from now on it is done, or refused
        await self._finish_telling()
        try:
            failpoint("promotion.commit")
            await asyncio.to_thread(write_document, self._folder / LIVE, live)
        except OSError as fault:
            raise RefusedError("disk", f"live.json cannot be written: {fault}") from None
        failpoint("promotion.committed")
        old = [self._pool, self._second]
        self.live = live
        if is_beside:
            self._second = pool
        else:
            self._pool, self._second = pool, None
        self._show_second(live)
        if is_other:
            self._front.switch(self.pool)
            self._switched(live.version)
        failpoint("promotion.switched")
        for each in old:
            if each is not None and each not in (self._pool, self._second):
                self._start_drain(each)
        news.info("%s %d: %s answers", wanted.action, wanted.number, live.version.label)
        self._telling = asyncio.get_running_loop().create_task(self._tell_outcome())

    def _show_second(self, live: LiveModel) -> None:
        self._front.set_shadow(self._second if live.second_is == "shadow" else None)
        self._front.set_split(self._second if live.second_is == "split" else None, live.percent)

    async def _refuse(self, wanted: WantedModel, why: RefusedError, figures: dict[str, Any]) -> None:
        version = wanted.version or (self.live.previous if wanted.action == "rollback" else None)
        outcome = PromotionRefusedEvent(
            number=wanted.number,
            cause=why.cause,
            words=why.words,
            version=None if version is None else version.facts,
            action=wanted.action,
            by=wanted.by,
            gate=figures,
        )
        news.warning("%s %d is refused (%s): %s", wanted.action, wanted.number, why.cause, why.words)
        await self._finish_telling()
        await self._write(msgspec.structs.replace(self.live, number=wanted.number, outcome=outcome))
        failpoint("promotion.refused")
        await self._tell_outcome()

    async def _tell_outcome(self) -> None:
        if self.live.outcome is not None:
            await self._tell(self.live.outcome)
            failpoint("promotion.told")
            self._is_told = True

    async def _finish_telling(self) -> None:
        """Before another outcome takes its place."""
        telling, self._telling = self._telling, None
        if telling is not None:
            await telling
        self._is_told = False

    async def _forget_outcome(self) -> None:
        """When there is nothing else to do: until then it is told again after a restart."""
        if self._is_told:
            self._is_told = False
            await self._write(msgspec.structs.replace(self.live, outcome=None))

    async def _write(self, live: LiveModel, sync: Sync = "file") -> None:
        """What is no commit: on a full disk, or after a power cut, the document is behind, and after a restart it is done again."""
        self.live = live
        try:
            await asyncio.to_thread(write_document, self._folder / LIVE, live, sync=sync)
        except OSError as fault:
            logger.warning("live.json cannot be written: %s", fault)

    # The end of old versions.

    def _start_drain(self, pool: ReplicaPool) -> None:
        task = asyncio.get_running_loop().create_task(self._drain(pool))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _drain(self, pool: ReplicaPool) -> None:
        try:
            await asyncio.wait_for(pool.drain(), DRAIN_S)
        except TimeoutError:
            logger.warning(
                "%s still had requests after %.0f s; they are cut off", pool.version.label, DRAIN_S
            )
        finally:
            await pool.close()
        self._retire_unused()

    def _retire_unused(self) -> None:
        """The version before the one that answers stays loaded: a rollback is quick."""
        live = self.live
        kept = {
            version.facts for version in (live.version, live.previous, live.second) if version is not None
        }
        for facts in self._warm - kept - {self._opening}:
            self._warm.discard(facts)
            self._retire(facts)
