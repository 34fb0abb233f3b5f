"""Promotions: what a served name answers with is changed, durably and by number.

    recorded ──> wanted.json ──> SIGUSR1 ──> the server: gate, switch ──> its event ──> done or refused

At every arrow the daemon may die. What was recorded and has not ended is written and told again by the next daemon, and
whenever a server says that it is ready; the server does each number once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from gen_worker.contract.document_schema import convert_document
from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.job.model_version import ModelVersion
from gen_worker.contract.job.spec import GateSpec
from gen_worker.contract.serving import WANTED, WantedModel, read_live, read_wanted, write_document
from gen_worker.errors import SpecError, StartupError
from trn.core.errors import InvalidRequestError
from trn.core.home import Home
from trn.core.runs import RunState
from trn.core.serving.records import Action, Promotion, ServedModel, WantedPromotion
from trn.daemon.serving.model_choice import ModelChoice
from trn.executors.base import Worker
from trn.executors.pools import Pools
from trn.registry.base import Registry
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.serving.promotions")

FAULT_PAUSE_S, TELL_AGAIN_S = 1.0, 5.0
MAX_BY = 200  # characters of who asked


class PromotionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A promotion as it is asked for. `model` is RUN@…, or @STEP of the run that is served."""

    name: str
    model: str = ""
    action: str = "promote"
    percent: float = 0.0
    gate: Mapping[str, Any] | None = None  # laid over that of the server's job
    by: str = ""
    promotion_id: str = ""


class Promotions:
    """One for a daemon. From the loop's thread."""

    def __init__(self, *, registry: Registry, choice: ModelChoice, pools: Pools, home: Home) -> None:
        self._registry = registry
        self._choice = choice
        self._pools = pools
        self._home = home
        self._news = asyncio.Event()
        self._telling = asyncio.Lock()

    def look(self) -> None:
        """A server said something: it may be ready for what is wanted of it."""
        self._news.set()

    async def run(self) -> None:
        """Tell servers what is wanted of them, until cancelled. Again while it is not done: the file may be damaged since."""
        while True:
            self._news.clear()
            if not await self.tell_all():
                await asyncio.sleep(FAULT_PAUSE_S)
                continue
            pause_s = TELL_AGAIN_S if self._registry.wanted() else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), pause_s)

    async def promote(self, request: PromotionRequest) -> Promotion:
        """Recorded when it returns; its server is being told. NotFoundError, ConflictError, InvalidRequestError."""
        if request.action not in ("promote", "shadow", "split"):
            raise InvalidRequestError(f"the action is {request.action!r}, expected promote, shadow or split")
        if request.action == "split" and not 0 < request.percent < 100:
            raise InvalidRequestError(
                f"percent is {request.percent:g}, expected more than 0 and less than 100"
            )
        served = self._registry.served(request.name)
        model = request.model
        if model.startswith("@") and served.live is not None:
            model = f"{served.live.run_id}{model}"
        version = (await self._choice.find(model)).version
        return await self.promote_version(served, version, request)

    async def promote_version(
        self, served: ServedModel, version: ModelVersion, request: PromotionRequest
    ) -> Promotion:
        """As `promote`, of a version that was found."""
        action: Action = msgspec.convert(request.action, Action)
        return await self._want(served, request, action, version, self._gate(served, request.gate))

    async def rollback(self, request: PromotionRequest) -> Promotion:
        """End a shadow or a split; else go back to the version that answered before. As `promote`."""
        served = self._registry.served(request.name)
        if served.second_is:
            return await self._want(served, request, "single", None, GateSpec())
        _, previous = self._registry.versions_of(served.name)
        return await self._want(served, request, "rollback", previous, GateSpec())

    async def _want(
        self,
        served: ServedModel,
        request: PromotionRequest,
        action: Action,
        version: ModelVersion | None,
        gate: GateSpec,
    ) -> Promotion:
        wanted = WantedPromotion(
            run_id=served.run_id,
            action=action,
            version=version,
            percent=request.percent if action == "split" else 0.0,
            gate=gate,
            by=request.by[:MAX_BY],
            promotion_id=request.promotion_id,
            after=await asyncio.to_thread(self._newest_number, served.run_id),
        )
        promotion = await committed(self._registry.want_promotion(wanted))
        failpoint("promotion.recorded")
        self._news.set()
        return promotion

    def _newest_number(self, run_id: str) -> int:
        """Of what the server was asked for or has finished, as its folder says it. It does nothing up to that number, and a
        registry that was restored from a backup may know of less."""
        folder, numbers = self._home.run(run_id).serving, [0]
        for read in (read_wanted, read_live):
            with contextlib.suppress(StartupError):
                found = read(folder)
                if found is not None:
                    numbers.append(found.number)
        return max(numbers)

    def _gate(self, served: ServedModel, changes: Mapping[str, Any] | None) -> GateSpec:
        """That of the server's job, with changes."""
        own = self._registry.get(served.run_id).config["serving"].get("gate") or {}
        try:
            return convert_document({**own, **(changes or {})}, GateSpec, source="the gate")
        except SpecError as fault:
            raise InvalidRequestError("the gate is not valid", fault.faults) from fault

    async def tell_all(self) -> bool:
        """Write down what is wanted of each server, and tell those that are ready. Safe to repeat. False where it failed
        for one."""
        is_done = True
        async with self._telling:
            for run_id, wanted in self._registry.wanted():
                try:
                    await self._tell(run_id, wanted)
                except Exception:
                    logger.exception("%s could not be told what is wanted of it; trying again", run_id)
                    is_done = False
        return is_done

    async def _tell(self, run_id: str, wanted: WantedModel) -> None:
        if wanted.action == "rollback":  # it knows which that is, and does not measure it
            wanted = msgspec.structs.replace(wanted, version=None)
        await asyncio.to_thread(self._write, run_id, wanted)
        failpoint("promotion.written")
        run = self._registry.get(run_id)
        served = self._registry.served_by(run_id)
        attempts = self._registry.attempts(run_id)
        if run.state is not RunState.RUNNING or not served.is_ready or not attempts[-1].worker:
            return  # it reads the file when it is ready
        worker = Worker(ref=attempts[-1].worker, pid=attempts[-1].pid)
        await self._pools.of(run.needs.pool).notify(worker)
        failpoint("promotion.signalled")

    def _write(self, run_id: str, wanted: WantedModel) -> None:
        folder = self._home.run(run_id).serving
        try:
            known = read_wanted(folder)
        except StartupError as fault:  # replaced by what follows
            logger.warning("%s", fault)
            known = None
        if known is None or known.number < wanted.number:
            # The registry has it: what a power cut takes of the file is written again.
            write_document(folder / WANTED, wanted, sync="none")
