"""TrainerDispatcher: takes runs from the queue, places them, and owns the supervisors of all that live.

It is woken by submits, ends and backoffs; a slow sweep is only the safety net. A round reads a window of the queue
for each kind of needs, so its cost does not grow with what waits behind.
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping

from gen_worker.contract.sizes import show_bytes
from trn.core.causes import DISK, PROCESS, QUEUED, Cause
from trn.core.errors import ConflictError, TrnError
from trn.core.home import Home, socket_address
from trn.core.runs import QueuedRun, RunRecord, RunState
from trn.core.settings import Settings
from trn.daemon.api.secret_values import SecretValues
from trn.daemon.dispatch.attempt_parts import DeviceView, EventIngest, Parts
from trn.daemon.dispatch.placement import FreeResources, choose_starts
from trn.daemon.dispatch.readiness import Readiness
from trn.daemon.dispatch.supervisor import AttemptSupervisor
from trn.daemon.dispatch.worker_plan import WorkerFiles, build_plan
from trn.daemon.intake.submission import find_misfits
from trn.daemon.machine.doctor_reports import DoctorReports
from trn.daemon.machine.environment_report import EnvironmentReports
from trn.daemon.machine.unknown_workers import UnknownWorkers
from trn.executors.pools import Pools
from trn.registry.base import NewRun, Registry
from trn.registry.writer import committed

logger = logging.getLogger("trn.daemon.dispatch.dispatcher")

WINDOW = 64  # runs of each kind of needs that a round looks at
MAX_REASONS = 64  # written at once
SAY_EVERY_S = 1.0
FAULT_PAUSE_S = 1.0


class TrainerDispatcher:
    """One for a daemon. All of it lives in the loop's thread."""

    def __init__(
        self,
        *,
        registry: Registry,
        pools: Pools,
        ingest: EventIngest,
        devices: DeviceView,
        home: Home,
        settings: Settings,
        python: str = sys.executable,
        environ: Mapping[str, str] = {},  # that workers inherit: named in their reports
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        free_bytes: Callable[[], int] | None = None,
        readiness: Readiness | None = None,
        doctor: DoctorReports | None = None,
        secrets: SecretValues | None = None,
        unknown: UnknownWorkers | None = None,
    ) -> None:
        """`readiness` is asked before a detected GPU is handed out; `doctor` is what runs keep of this machine."""
        self._parts = Parts(
            registry=registry,
            pools=pools,
            ingest=ingest,
            devices=devices,
            home=home,
            settings=settings,
            reports=EnvironmentReports(devices.inventory, environ=environ, doctor=doctor),
            doorbell=socket_address(home.doorbell),
            python=python,
            launcher_python=python,
            secrets=secrets or SecretValues(environ),
            unknown=unknown or UnknownWorkers(registry=registry, pools=pools, home=home),
            clock=clock,
            now_ms=now_ms,
        )
        self._free_bytes = free_bytes or (lambda: shutil.disk_usage(home.root).free)
        self._readiness = readiness
        self._supervisors: dict[str, AttemptSupervisor] = {}
        self._woken = asyncio.Event()
        self._say_again_at = float("-inf")
        self._free_cpus = 1  # as the last round found
        self._has_unsaid = True
        self._swept = float("-inf")

    def wake(self) -> None:
        """Something may be able to start: look soon."""
        self._has_unsaid = True
        self._woken.set()

    def submitted(self) -> None:
        """Another run waits. Where no CPU was free, nothing can start here before something ends, which wakes anyway."""
        self._has_unsaid = True
        if self._free_cpus > 0 or self._parts.pools.has_others:
            self._woken.set()

    def cancel_wanted(self, run_id: str) -> None:
        """A cancel was recorded: carry it out."""
        supervisor = self._supervisors.get(run_id)
        if supervisor is not None:
            supervisor.cancel()
        self.wake()

    def worker_environ(self, pool: str) -> Mapping[str, str]:
        """What every worker of that pool inherits."""
        return self._parts.pools.of(pool).worker_environ()

    def plan(self, new: NewRun) -> WorkerFiles:
        """What would be started for it on an idle machine. Queues nothing, writes nothing."""
        parts = self._parts
        device_ids = tuple(device.device_id for device in parts.devices.inventory.devices)
        queued = QueuedRun(
            run_id=new.run_id, priority=0, submitted_ms=0, needs=new.needs, cause=QUEUED, attempt=0
        )
        idle = FreeResources(device_ids=device_ids, cpus=new.needs.cpus, memory_mb=new.needs.memory_mb)
        starts = choose_starts([queued], idle, now_ms=0, patience_s=0).starts
        chosen = starts[0][1] if starts else new.needs.devices
        now_ms = parts.now_ms()
        run = RunRecord(
            run_id=new.run_id,
            digest=new.digest,
            state=RunState.PENDING,
            cause=QUEUED,
            config=new.config,
            snapshot=new.snapshot,
            frozen_from=new.frozen_from,
            base_dir=new.base_dir,
            interpreter=new.interpreter,
            submitted_ms=now_ms,
            updated_ms=now_ms,
            kind=new.kind,
            needs=new.needs,
            secret_env=new.secret_env,
        )
        return build_plan(
            run,
            1,
            parts.home.run(new.run_id),
            device_ids=chosen,
            devices_env=parts.devices.worker_env(chosen),
            doorbell=parts.doorbell,
            python=parts.python,
            launcher_python=parts.launcher_python,
            is_detected=parts.settings.inventory.devices is None,
            inherited=self.worker_environ(new.needs.pool),
        )

    async def run(self) -> None:
        """Adopt what lives, then dispatch for ever. Cancelled: no worker is watched any more, and all continue."""
        parts = self._parts
        async with asyncio.TaskGroup() as group, contextlib.aclosing(self):
            group.create_task(parts.reports.complete(parts.home, parts.registry.reader, python=parts.python))
            while True:
                self._woken.clear()
                try:
                    await self._round(group)
                    idle_s = self._idle_s()
                except Exception:  # the registry or the disk: nothing was started that is not recorded
                    logger.exception("a round of the dispatcher failed")
                    await asyncio.sleep(FAULT_PAUSE_S)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(idle_s):
                        await self._woken.wait()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Let go of what only helps."""
        self._parts.reports.close()

    def _idle_s(self) -> float:
        """Until the next sweep or the end of a backoff."""
        parts = self._parts
        idle_s = max(self._swept + parts.settings.sweep_s - parts.clock(), 0.0)
        if self._has_unsaid:
            idle_s = min(idle_s, max(self._say_again_at - self._loop_time(), 0.0))
        now_ms = parts.now_ms()
        backoff_ms = parts.registry.next_backoff_ms(now_ms)
        if backoff_ms is not None:
            idle_s = min(idle_s, (backoff_ms - now_ms) / 1000 + 0.001)
        return idle_s

    async def _round(self, group: asyncio.TaskGroup) -> None:
        parts = self._parts
        if parts.clock() - self._swept >= parts.settings.sweep_s:
            self._swept = parts.clock()
            self._adopt(group)
            await self._lift_quarantines()
            await parts.unknown.look_again()
        cpus_held, memory_mb_held = parts.registry.held()
        unknown = parts.unknown.held
        cpus_held, memory_mb_held = cpus_held + unknown.cpus, memory_mb_held + unknown.memory_mb
        free_cpus = self._free_cpus = max(parts.devices.inventory.cpus - cpus_held, 0)
        is_time_to_say = self._loop_time() >= self._say_again_at
        # More runs than there are CPUs cannot start here; further ones are read to say why they wait, and for other pools.
        is_whole = is_time_to_say or parts.pools.has_others
        if free_cpus == 0 and not is_whole:
            return  # every run needs one
        limit = WINDOW if is_whole else min(free_cpus + 1, WINDOW)
        # A run that is about to be tried again has its last supervisor for a moment more, whose end wakes us.
        queue = [
            run
            for run in parts.registry.queue(parts.now_ms(), limit + len(self._supervisors))
            if run.run_id not in self._supervisors
        ]
        if not queue:
            self._has_unsaid = False
            return
        free_bytes = self._free_bytes()
        if free_bytes < parts.settings.min_free_bytes:
            values = {
                "path": str(parts.home.root),
                "free": show_bytes(free_bytes),
                "min_free": show_bytes(parts.settings.min_free_bytes),
            }
            full = Cause(id="waits-for-disk", fault="machine", waits_for=(DISK,), values=values)
            if is_time_to_say:
                await self._say(queue, dict.fromkeys((run.run_id for run in queue), full))
            return
        slots = parts.registry.slots()
        known = [device.device_id for device in parts.devices.inventory.devices]
        usable = {slot["device_id"] for slot in slots if not slot["quarantine_reason"]}
        taken = {slot["device_id"] for slot in slots if slot["run_id"] is not None} | unknown.devices.keys()
        open_ids = [device_id for device_id in known if device_id in usable]
        waits = self._find_unfit(queue, open_ids)
        unready, barred = self._find_unready(queue, open_ids)
        while unready and (behind := self._look_behind(queue, unready, limit)):
            queue += behind
            unready, barred = self._find_unready(queue, open_ids)
        waits = {**unready, **waits, **self._find_in_use(queue)}
        free = FreeResources(
            device_ids=tuple(device_id for device_id in known if device_id in usable - taken),
            cpus=free_cpus,
            memory_mb=parts.devices.inventory.memory_mb - memory_mb_held,
        )
        decision = choose_starts(
            [run for run in queue if run.run_id not in waits],
            free,
            now_ms=parts.now_ms(),
            patience_s=parts.settings.backfill_patience_s,
            barred=barred,
        )
        await self._start(decision.starts, group)
        if is_time_to_say:
            await self._say(queue, {**waits, **decision.waits})

    def _find_unfit(self, queue: list[QueuedRun], usable: list[str]) -> dict[str, Cause]:
        """Runs that could not start even if all others ended: they must not keep anything from anybody."""
        inventory = self._parts.devices.inventory
        waits = {}
        for run in queue:
            if not run.needs.is_local:
                if run.needs.pool not in self._parts.pools:
                    values = {"pool": run.needs.pool}
                    waits[run.run_id] = Cause(id="pool-missing", fault="machine", values=values)
                continue
            misfits = find_misfits(run.needs, usable, cpus=inventory.cpus, memory_mb=inventory.memory_mb)
            if misfits:
                values = {"detail": str(misfits[0])}
                waits[run.run_id] = Cause(id="devices-missing", fault="machine", values=values)
        return waits

    def _find_in_use(self, queue: list[QueuedRun]) -> dict[str, Cause]:
        """Runs in whose folder a worker of another submission lives."""
        found = {run.run_id: self._parts.unknown.worker_in(run.run_id) for run in queue}
        return {
            run_id: Cause(
                id="waits-for-process",
                fault="machine",
                waits_for=(PROCESS,),
                values={"pid": worker.pid} if worker.pid else {"worker": worker.ref},
            )
            for run_id, worker in found.items()
            if worker is not None
        }

    def _find_unready(
        self, queue: list[QueuedRun], usable: list[str]
    ) -> tuple[dict[str, Cause], dict[str, frozenset[str]]]:
        """(why runs cannot use any GPU yet, the kinds of GPUs that others cannot use), of what was detected."""
        devices = self._parts.devices.inventory.devices
        kinds = {device.device_id: device.kind for device in devices if not device.is_declared}
        waits: dict[str, Cause] = {}
        barred: dict[str, frozenset[str]] = {}
        if not kinds or self._readiness is None:
            return waits, barred
        ask = functools.cache(self._readiness.obstacle)  # once, however many runs have the same question
        for run in queue:
            if not run.needs.is_local:
                continue
            wanted = run.needs.devices or (usable if run.needs.gpus else ())
            count = len(run.needs.devices) or run.needs.gpus
            python = run.interpreter or self._parts.python
            obstacles = {
                kind: ask(python, kind=kind, num_gpus=count) if kind else None
                for kind in dict.fromkeys(kinds.get(device_id, "") for device_id in wanted)
            }
            bars = {kind: obstacle for kind, obstacle in obstacles.items() if obstacle is not None}
            if bars and (run.needs.devices or len(bars) == len(obstacles)):
                waits[run.run_id] = next(iter(bars.values()))
            elif bars:
                barred[run.run_id] = frozenset(bars)
        return waits, barred

    def _look_behind(
        self, queue: list[QueuedRun], unready: Mapping[str, Cause], limit: int
    ) -> list[QueuedRun]:
        """Further runs, where those that are not ready fill a window: they must not hide the others of their kind."""
        passed = [run for run in queue if run.run_id in unready]
        if max(Counter(run.needs for run in passed).values()) < limit:
            return []
        without = sorted({run.interpreter for run in passed})
        seen = {run.run_id for run in queue}
        behind = self._parts.registry.queue(self._parts.now_ms(), limit, without=without)
        return [run for run in behind if run.run_id not in seen]

    async def _start(self, starts: tuple[tuple[str, tuple[str, ...]], ...], group: asyncio.TaskGroup) -> None:
        # All at once: claims that wait together share one commit.
        claims = [(run_id, self._parts.registry.claim(run_id, device_ids)) for run_id, device_ids in starts]
        for run_id, claim in claims:
            try:
                await committed(claim)
            except ConflictError as fault:  # it was cancelled, say
                logger.info("run %s is not started: %s", run_id, fault)
            except TrnError as fault:
                logger.error("run %s could not be claimed: %s", run_id, fault)  # noqa: TRY400
            else:
                self._supervise(self._parts.registry.get(run_id), group, is_adopted=False)
        if len(starts) >= WINDOW:
            self.wake()

    async def _say(self, queue: list[QueuedRun], waits: Mapping[str, Cause]) -> None:
        """Write why runs wait, where that is news. Not at every round: in a burst that would be a write for each run."""
        self._say_again_at = self._loop_time() + SAY_EVERY_S
        news = [run.run_id for run in queue if waits.get(run.run_id, run.cause) != run.cause]
        self._has_unsaid = len(news) > MAX_REASONS
        changes = [self._parts.registry.set_cause(run_id, waits[run_id]) for run_id in news[:MAX_REASONS]]
        for change in changes:
            await committed(change)

    def _adopt(self, group: asyncio.TaskGroup) -> None:
        """Every live run has a supervisor: after a restart, and if ever one was lost."""
        for run in self._parts.registry.live():
            if run.run_id not in self._supervisors:
                logger.info("adopting %s#%d", run.run_id, run.attempt)
                self._supervise(run, group, is_adopted=True)

    def _supervise(self, run: RunRecord, group: asyncio.TaskGroup, *, is_adopted: bool) -> None:
        supervisor = AttemptSupervisor(run, self._parts, is_adopted=is_adopted)
        self._supervisors[run.run_id] = supervisor
        group.create_task(self._tend(run.run_id, supervisor), name=f"supervisor-{run.run_id}")

    async def _tend(self, run_id: str, supervisor: AttemptSupervisor) -> None:
        try:
            await supervisor.run()
        except Exception:
            logger.exception("the supervisor of %s failed; the next sweep gives it another", run_id)
        finally:
            del self._supervisors[run_id]
        self.wake()

    async def _lift_quarantines(self) -> None:
        """Hand out again what no other process uses any more."""
        parts = self._parts
        known = {device.device_id for device in parts.devices.inventory.devices}
        for slot in parts.registry.slots():
            device_id = slot["device_id"]
            if not slot["quarantine_reason"] or slot["run_id"] is not None or device_id not in known:
                continue
            try:
                if not await parts.devices.foreign_processes(device_id, set()):
                    await committed(parts.registry.quarantine(device_id, ""))
                    logger.info("%s is free again", device_id)
            except Exception:
                logger.exception("%s: whether it is free could not be found out", device_id)
