"""TrainerService: the calls of `proto/trainer.proto`, without a transport.

A call takes the fields of its request as keywords, or one record, and returns a record; streams are async generators. A
transport converts both by field name, decides who may call, and makes its own statuses of TrnErrors: see `server`.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from trn.core.errors import NotFoundError, TrnError, UnavailableError
from trn.core.home import Home
from trn.core.runs import AttemptRecord, LineagePart, RunRecord, RunState
from trn.core.serving.records import Promotion, ServedModel
from trn.daemon.api.artifact_calls import ArtifactCalls
from trn.daemon.api.run_streams import RunStreams
from trn.daemon.api.tokens import ApiTokens
from trn.daemon.intake.intake import Checked, Dispatcher, Intake, Submitted
from trn.daemon.intake.resumption import ResumeRequest
from trn.daemon.intake.run_judge import DeviceInventory
from trn.daemon.intake.run_labels import check_labels
from trn.daemon.intake.submission import Submission
from trn.daemon.machine.unknown_workers import Held
from trn.daemon.serving.promotions import PromotionRequest, Promotions
from trn.daemon.upkeep.removal import Freed, Pruned, PruneRule, Removal
from trn.daemon.upkeep.retries import is_daemon_fault
from trn.daemon.upkeep.singleton import DaemonInfo
from trn.proto.page_tokens import make_page_token, read_page_token
from trn.proto.records import Device, Health, Machine
from trn.registry.base import Registry
from trn.registry.metrics import Discarded, MetricReader, Series, line_of_descent
from trn.registry.writer import committed

_log = logging.getLogger(__name__)

DEFAULT_PAGE, MAX_PAGE = 100, 1000
PAGE_BYTES = 2 << 20  # a page ends early rather than outgrow a message
MAX_POINTS = 500_000
MAX_REASON = 1000
GROUP = "group"  # a job's group is kept as this tag


class Launcher(Protocol):
    def state(self) -> str: ...


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    run: RunRecord
    was_live: bool


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    run: RunRecord


class RunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    run: RunRecord
    attempts: Sequence[AttemptRecord]
    folder: str


class RunPage(msgspec.Struct, frozen=True, kw_only=True):
    runs: Sequence[RunRecord] = ()
    next_page_token: str = ""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    series: Sequence[Series]
    lineage: Sequence[LineagePart]
    discarded: Sequence[Discarded] = ()


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    promotion: Promotion


class ServedList(msgspec.Struct, frozen=True, kw_only=True):
    served: Sequence[ServedModel]


class ServedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    served: ServedModel
    promotions: Sequence[Promotion]


class PromoteToken(msgspec.Struct, frozen=True, kw_only=True):
    token: str


class TrainerService:
    """All calls. `info`, `warnings` and `unknown_held` are set by the assembler once it knows them."""

    def __init__(
        self,
        *,
        registry: Registry,
        metrics: MetricReader,
        intake: Intake,
        promotions: Promotions,
        streams: RunStreams,
        dispatcher: Dispatcher,
        launcher: Launcher,
        removal: Removal,
        devices: DeviceInventory,
        home: Home,
        info: DaemonInfo,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._intake = intake
        self._promotions = promotions
        self._dispatcher = dispatcher
        self._launcher = launcher
        self._removal = removal
        self._devices = devices
        self._home = home
        self.info = info
        self.warnings: Callable[[], Sequence[str]] = lambda: ()
        self.unknown_held: Callable[[], Held] = Held  # what workers hold that the registry does not know
        self.tokens = ApiTokens(home.token)
        self.streams = streams
        self.watch_runs, self.stream_events, self.stream_logs = (
            streams.watch_runs,
            streams.stream_events,
            streams.stream_logs,
        )
        artifacts = ArtifactCalls(registry=registry, home=home)
        self.list_artifacts, self.read_artifact = artifacts.list_artifacts, artifacts.read_artifact
        self.num_calls = 0
        self._num_calls_seen = 0

    def is_in_use(self) -> bool:
        """Whether a stream is open, or a call was made since the last look."""
        has_news, self._num_calls_seen = self.num_calls != self._num_calls_seen, self.num_calls
        return has_news or self.streams.num_open > 0

    async def submit_run(self, submission: Submission) -> Submitted:
        return self._with_token(await self._intake.submit(submission))

    async def check_run(self, submission: Submission) -> Checked:
        return await self._intake.check(submission)

    async def resume_run(self, request: ResumeRequest) -> Submitted:
        return self._with_token(await self._intake.resume(request))

    async def cancel_run(self, run_id: str, *, reason: str = "", is_exact: bool = False) -> Cancelled:
        run_id = self.find(run_id, is_exact=is_exact).run_id
        reason = reason[:MAX_REASON] or "cancelled by request"
        record, was_live = await committed(self._registry.want_cancel(run_id, reason))
        if was_live:
            self._dispatcher.cancel_wanted(run_id)
        return Cancelled(run=_without_config(record), was_live=was_live)

    async def update_run(
        self,
        run_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        tags: Mapping[str, str] = MappingProxyType({}),
        removed_tags: Sequence[str] = (),
        is_exact: bool = False,
    ) -> Updated:
        run = self.find(run_id, is_exact=is_exact)
        check_labels(run, name=name, notes=notes, tags=tags, removed_tags=removed_tags)
        changed = self._registry.set_labels(
            run.run_id, name=name, notes=notes, tags=tags, removed_tags=removed_tags
        )
        return Updated(run=_without_config(await committed(changed)))

    async def get_run(self, run_id: str, *, is_exact: bool = False) -> RunAnswer:
        record = self.find(run_id, is_exact=is_exact)
        folder = str(self._home.run(record.run_id).root)
        return RunAnswer(run=record, attempts=self._registry.attempts(record.run_id), folder=folder)

    async def list_runs(
        self,
        *,
        states: Sequence[str] = (),
        name_contains: str = "",
        tags: Mapping[str, str] = MappingProxyType({}),
        group: str = "",
        page_size: int = 0,
        page_token: str = "",
        with_config: bool = False,
    ) -> RunPage:
        before = read_page_token(page_token)
        known = [RunState(word) for word in states if word in RunState.__members__]
        if states and not known:
            return RunPage()  # no run of ours can be in a state that we do not know
        size = min(page_size or DEFAULT_PAGE, MAX_PAGE)
        records = self._registry.page(
            states=known,
            name=name_contains,
            tags={**tags, GROUP: group} if group else tags,
            before=before,
            limit=size,
            with_config=with_config,
        )
        runs: list[RunRecord] = []
        size_bytes = 0
        for record in records:
            size_bytes += len(msgspec.json.encode(record))
            if runs and size_bytes > PAGE_BYTES:
                break
            runs.append(record)
        is_more = runs and (len(records) == size or len(runs) < len(records))
        return RunPage(
            runs=runs,
            next_page_token=make_page_token(runs[-1].submitted_ms, runs[-1].run_id) if is_more else "",
        )

    async def get_metrics(
        self,
        run_id: str,
        *,
        names: Sequence[str] = (),
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 0,
        is_exact: bool = False,
        with_ancestors: bool = False,
        with_discarded: bool = False,
    ) -> Metrics:
        record = self.find(run_id, is_exact=is_exact)
        lineage = self._registry.lineage(record) if with_ancestors else []
        stretches = line_of_descent(lineage or [LineagePart(run_id=record.run_id)], from_step, to_step)
        found = await asyncio.to_thread(
            self._metrics.query_line, stretches, list(names), max_points, MAX_POINTS
        )
        discarded: Sequence[Discarded] = ()
        if with_discarded:
            room = MAX_POINTS - sum(len(series.steps) for series in found)
            discarded = await asyncio.to_thread(
                self._metrics.discarded, stretches, list(names), max_points, room
            )
        return Metrics(series=found, lineage=lineage, discarded=discarded)

    async def remove_runs(
        self, run_ids: Sequence[str], *, is_dry_run: bool = False, is_exact: bool = False
    ) -> Pruned:
        found, gone = [], []
        for run_id in run_ids:
            try:
                found.append(self.find(run_id, is_exact=is_exact).run_id)
            except NotFoundError:
                if not self._registry.was_removed(run_id):
                    raise
                gone.append(Freed("gone", run_id, 0))  # perhaps by this very request, whose reply was lost
        return Pruned([*await self._removal.remove(found, is_dry_run=is_dry_run), *gone], [])

    async def prune(
        self,
        *,
        ended_before_ms: int,
        keep_best: int = 0,
        metric: str = "",
        is_max_best: bool = False,
        is_dry_run: bool = False,
    ) -> Pruned:
        rule = PruneRule(
            ended_before_ms=ended_before_ms, keep_best=keep_best, metric=metric, is_max_best=is_max_best
        )
        return await self._removal.prune(rule, is_dry_run=is_dry_run)

    async def promote(
        self,
        name: str,
        *,
        model: str = "",
        action: str = "promote",
        percent: float = 0.0,
        gate: Mapping[str, Any] | None = None,
        by: str = "",
        promotion_id: str = "",
    ) -> Promoted:
        request = PromotionRequest(
            name=name,
            model=model,
            action=action or "promote",
            percent=percent,
            gate=gate,
            by=by,
            promotion_id=promotion_id,
        )
        return Promoted(promotion=await self._promotions.promote(request))

    async def rollback(self, name: str, *, by: str = "", promotion_id: str = "") -> Promoted:
        request = PromotionRequest(name=name, by=by, promotion_id=promotion_id)
        return Promoted(promotion=await self._promotions.rollback(request))

    async def list_served(self) -> ServedList:
        return ServedList(served=self._registry.all_served())

    async def get_served(self, name: str, *, limit: int = 0) -> ServedAnswer:
        served = self._registry.served(name)
        size = min(limit or DEFAULT_PAGE, MAX_PAGE)
        return ServedAnswer(served=served, promotions=self._registry.promotions(served.name, size))

    async def make_promote_token(self, name: str) -> PromoteToken:
        return PromoteToken(token=self.tokens.make_promote_token(self._registry.served(name).name))

    async def list_devices(self) -> Machine:
        inventory = self._devices.inventory
        slots = {slot["device_id"]: slot for slot in self._registry.slots()}
        cpus_held, memory_mb_held = self._registry.held()
        unknown = self.unknown_held()

        def read(device_id: str, **fields: Any) -> Device:
            slot: dict[str, Any] = slots.get(device_id, {})
            return Device(
                device_id=device_id,
                run_id=slot.get("run_id") or "",
                attempt=slot.get("attempt") or 0,
                quarantine_reason=slot.get("quarantine_reason") or unknown.reason_of(device_id),
                **fields,
            )

        return Machine(
            devices=tuple(
                read(device.device_id, kind=device.kind, name=device.name, memory_mb=device.memory_mb)
                for device in inventory.devices
            ),
            cpus=inventory.cpus,
            cpus_held=cpus_held + unknown.cpus,
            memory_mb=inventory.memory_mb,
            memory_mb_held=memory_mb_held + unknown.memory_mb,
        )

    async def get_health(self) -> Health:
        return Health(
            version=self.info.version,
            pid=self.info.pid,
            started_ms=self.info.started_ms,
            home=str(self._home.root),
            address=", ".join(self.info.addresses),
            runs_by_state=self._registry.counts(),
            launcher=self._launcher.state(),
            num_watchers=self.streams.num_open,
            warnings=tuple(self.warnings()),
            last_change=self._registry.last_change(),
        )

    def find(self, run_id: str, *, is_exact: bool = False) -> RunRecord:
        """The run that is meant. What could be no id is refused before anything is looked up."""
        self._home.run(run_id)
        return self._registry.find(run_id, is_exact=is_exact)

    def nonce_of(self, run_id: str) -> str | None:
        """Of the submission that has this id; None where there is none."""
        with contextlib.suppress(NotFoundError):
            return self._registry.get(run_id).nonce
        return None

    def server_of(self, name: str) -> str | None:
        """The run that serves that name; None where there is none."""
        with contextlib.suppress(NotFoundError):
            return self._registry.served_as(name).run_id
        return None

    def run_of_artifact(self, artifact_id: str) -> str | None:
        """None where there is no such artifact."""
        with contextlib.suppress(NotFoundError):
            return self._registry.artifact(artifact_id).run_id
        return None

    def _with_token(self, made: Submitted) -> Submitted:
        if not isinstance(made.run, RunRecord):
            return made
        token = self.tokens.make_run_token(made.run.run_id, made.run.nonce)
        return msgspec.structs.replace(made, run=_without_config(made.run), run_token=token)


def as_trn_error(fault: Exception, call: str) -> TrnError:
    """What a caller gets to know of any error. The text of one that is not ours stays in the log."""
    if isinstance(fault, TrnError):
        return fault
    if is_daemon_fault(fault):
        _log.warning("%s: %s", call, fault)
        return UnavailableError(f"the daemon cannot answer now: {fault}; try again")
    number = secrets.token_hex(4)
    _log.error("error %s in %s", number, call, exc_info=fault)
    return TrnError(f"the daemon failed in {call}: error {number}; see `daemon.log` in its home")


def _without_config(record: RunRecord) -> RunRecord:
    return msgspec.structs.replace(record, config={})
