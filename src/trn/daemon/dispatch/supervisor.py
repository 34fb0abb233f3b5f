"""The life of one attempt, from its claim to its end in the registry.

    claimed ──> files ──> launch ──> launched ──> watch ──> [SIGTERM, grace, kill] ──> ended
                  │          │ adopted after a restart: find ──┘                         │
                  └──────────┴── never started ──> decide <── close the events <── end what it left
                                                      └──> registry.end: slots freed, run moved on

Invariant: at every await the daemon may die, and the next supervisor of this attempt enters through `find`, the only
judge of whether a process stands for it: by the registry, where that knows it, else by the attempt's record. So whatever was done is either repeatable (files, launch, signals, the
terminal event, the end) or asked for again (what the process is, how it ended, what its events say). Nothing is
remembered here that a restart would need:
- before `launch` returns: `find` gives the process, or makes sure that there never is one;
- between `launch` and `launched`: the same, the registry only learns later what process it is;
- while watching: all clocks begin anew, which can only be kinder to the worker; a cancel is in the registry;
- after its end: how it ended is in its exit file; its terminal event carries our cause; `registry.end` is the last act,
  and repeatable. Slots are freed there and nowhere else: after everything that the worker started is gone.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from gen_worker.contract.failpoints import failpoint
from gen_worker.contract.files.regular import NotRegularFileError
from trn.core.cause_words import say_cause
from trn.core.causes import failure
from trn.core.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from trn.core.runs import PREDICTION, SERVER, RunRecord, RunState
from trn.core.snapshots import materialise
from trn.daemon.api.secret_values import reveal
from trn.daemon.dispatch.attempt_parts import Parts, read_limits
from trn.daemon.dispatch.endings import CANCEL, StopReason, close_fields, decide
from trn.daemon.dispatch.worker_plan import WorkerFiles, build_plan, write_attempt_files
from trn.daemon.ingest.event_file import Terminal
from trn.daemon.intake.saved_checkpoints import find_next_start
from trn.daemon.upkeep.retries import (
    STEP_TIMEOUT_S,
    Pause,
    commit_until_done,
    is_daemon_fault,
    retry_until_done,
    try_step,
)
from trn.executors.base import AttemptKey, Executor, LaunchUnknownError, RunFile, Worker, WorkerExit
from trn.executors.run_folders import find_foreign, set_aside
from trn.registry.base import Ending

logger = logging.getLogger("trn.daemon.dispatch.supervisor")

MAX_CLOSE_TRIES = 10  # over 20 s: the disk may be full just then, or a new launcher slow
_TAIL_BYTES = 64 << 10


class AttemptSupervisor:
    """Owns one attempt until it has ended. `run` is its whole life; cancelling that leaves the worker running."""

    def __init__(self, run: RunRecord, parts: Parts, *, is_adopted: bool) -> None:
        self._run = run
        self._parts = parts
        self._is_adopted = is_adopted
        self._key = AttemptKey(run.run_id, run.attempt, run.nonce)
        self._folder = parts.home.run(run.run_id)
        self._limits = read_limits(run)
        self._stop_reason: StopReason | None = None
        self._is_cancel_asked = run.is_cancel_wanted
        self._nap: asyncio.Timeout | None = None
        self._has_spoken = False
        self._terminal: Terminal | None = None
        self._num_looks = 0
        self._quiet_since = 0.0  # silence is counted from here at the earliest

    def cancel(self) -> None:
        """Look at the registry now: a cancel was recorded there."""
        self._is_cancel_asked = True
        if self._nap is not None and not self._nap.expired():
            self._nap.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """From launch or adoption to the end in the registry."""
        failpoint("attempt.claimed")
        worker = await self._begin()
        worker_exit = None
        if worker is not None:
            self._stop_reason = None
            worker_exit = await self._watch_to_end(worker)
            failpoint("attempt.exited")
            await self._end_all(worker)
            await self._check_devices()
            await self._close(worker_exit)
        await self._conclude(worker_exit)

    async def _begin(self) -> Worker | None:
        """The attempt's process; None: there is none and never will be, and `_stop_reason` may say why."""
        if self._is_adopted or self._is_cancel_asked:
            return await self._find()
        run = self._run
        secrets, missing = self._parts.secrets.find(run.submission_id, run.secret_env)
        if missing:
            self._stop_reason = StopReason(cause="secret-missing", values={"names": list(missing)})
            return await self._find()
        try:
            files = self._build_files(self._devices_env())
            await asyncio.to_thread(self._prepare, files)
            failpoint("attempt.files_written")
            async with asyncio.timeout(self._parts.settings.start_timeout_s):
                worker = await self._executor.launch(files.plan, reveal(secrets))
        except LaunchUnknownError as fault:
            logger.warning("%s: %s", self._key, fault)
        except (NotFoundError, InvalidRequestError) as fault:
            self._stop_reason = StopReason(cause="code-missing", values={"detail": str(fault)})
        except (UnavailableError, OSError) as fault:
            self._stop_reason = StopReason(cause="launch-failed", values={"detail": str(fault)})
        except Exception as fault:
            logger.exception("%s could not be launched", self._key)
            detail = f"{type(fault).__name__}: {fault}"
            self._stop_reason = StopReason(cause="trn-fault", values={"detail": detail})
        else:
            failpoint("attempt.launched")
            if run.needs.is_local:  # it describes this machine
                python, store = files.plan.argv[0], self._parts.home.snapshots
                self._parts.reports.write_soon(run, self._folder.report, python=python, store=store)
            return worker
        return await self._find()

    def _devices_env(self) -> Mapping[str, str]:
        try:
            return self._parts.devices.worker_env(self._run.devices)
        except NotFoundError as fault:  # it waits again, and says for what
            raise UnavailableError(str(fault)) from fault

    def _prepare(self, files: WorkerFiles) -> None:
        python = files.plan.argv[0]
        if not Path(python).is_file():
            raise NotFoundError(
                f"the run was submitted with the Python {python}, which is not there any more"
            )
        self._require_own_folder()
        write_attempt_files(files, self._folder)
        if self._run.snapshot:
            materialise(self._parts.home.snapshots, self._run.snapshot, self._folder.code)

    def _require_own_folder(self) -> None:
        """What another submission left there is moved aside. UnavailableError where its worker still lives."""
        run = self._run
        foreign = find_foreign(self._folder, run.nonce, is_first_attempt=run.attempt == 1)
        if foreign:
            logger.warning("%s: %s: %s", self._key, self._folder.root, foreign)
            self._parts.unknown.note_moved(run.run_id, set_aside(self._parts.home, run.run_id))

    def _build_files(self, devices_env: Mapping[str, str]) -> WorkerFiles:
        parts = self._parts
        return build_plan(
            self._run,
            self._key.number,
            self._folder,
            device_ids=self._run.devices,
            devices_env=devices_env,
            doorbell=parts.doorbell,
            python=parts.python,
            launcher_python=parts.launcher_python,
            is_detected=parts.settings.inventory.devices is None,
            inherited=self._executor.worker_environ(),
        )

    async def _find(self) -> Worker | None:
        """What the registry knows of the process counts before the absence of a file."""
        known = self._find_recorded()
        if known is not None:
            return known
        pause = Pause()
        while True:
            try:
                return await self._executor.find(self._key)
            except Exception:
                logger.exception("whether %s has a process could not be found out; trying again", self._key)
            await pause.rest()

    def _find_recorded(self) -> Worker | None:
        for attempt in self._parts.registry.attempts(self._key.run_id):
            if attempt.number == self._key.number and attempt.worker:
                return Worker(ref=attempt.worker, pid=attempt.pid)
        return None

    async def _watch_to_end(self, worker: Worker) -> WorkerExit:
        """How the worker ended. A fault of ours never ends it: it is watched again, for as long as it runs."""
        pause = Pause()
        while True:
            num_looks = self._num_looks
            try:
                return await self._watch(worker)
            except Exception:
                logger.exception("%s: watching it failed; beginning again", self._key)
            if self._num_looks > num_looks:
                pause.reset()
            # Whatever is wrong with the rest of the watch, its end is not missed.
            pause_s = pause.next_s()
            try:
                worker_exit = await self._wait(worker, pause_s)
            except Exception:
                logger.exception("%s: waiting for its end failed, too", self._key)
                await asyncio.sleep(pause_s)
            else:
                if worker_exit is not None:
                    return worker_exit

    async def _watch(self, worker: Worker) -> WorkerExit:
        parts = self._parts
        parts.ingest.follow(*self._named)
        begun = self._quiet_since = parts.clock()
        try:
            await commit_until_done(
                self._key,
                lambda: parts.registry.launched(*self._named, worker=worker.ref, pid=worker.pid),
            )
        except ConflictError as fault:  # the registry knows it as ended: it must not go on
            return await self._stop(worker, StopReason(cause="trn-fault", values={"detail": str(fault)}))
        limits_s = parts.settings.start_timeout_s, parts.settings.heartbeat_timeout_s
        look_s = min(parts.settings.sweep_s, min(limits_s) / 4)
        due = parts.clock() + look_s
        while True:
            nap_s = 0 if self._is_cancel_asked else max(due - parts.clock(), 0)
            worker_exit = await self._wait(worker, nap_s, is_nap=True)
            if worker_exit is not None:
                return worker_exit
            now = parts.clock()
            if not self._has_spoken:
                self._has_spoken = await asyncio.to_thread(
                    _has_events, self._executor.events(self._key.run_id), self._key
                )
            if now - due > self._silence_limit_s() / 2:
                self._quiet_since = now  # it was us who slept
            stop_reason = await self._judge(begun)
            if stop_reason is not None:
                return await self._stop(worker, stop_reason)
            due = parts.clock() + look_s
            self._num_looks += 1

    async def _wait(self, worker: Worker, timeout_s: float, *, is_nap: bool = False) -> WorkerExit | None:
        """None where it still runs then; `cancel` ends a nap early, but not the grace of one that is stopping."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._nap = limit if is_nap else None
                return await self._executor.wait(self._key, worker)
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._nap = None

    async def _judge(self, begun: float) -> StopReason | None:
        """Why it has to end now, if it has to."""
        parts, limits = self._parts, self._limits
        self._is_cancel_asked = False
        run = parts.registry.get(self._key.run_id)
        if run.is_cancel_wanted:
            return StopReason(cause=CANCEL)
        patience_s = limits.grace_s + parts.settings.kill_patience_s
        if limits.time_limit_s is not None and parts.clock() - begun > limits.time_limit_s + patience_s:
            return StopReason(cause="time-limit", values={"limit_s": limits.time_limit_s})
        if self._silence_s() <= self._silence_limit_s():
            return None
        try:  # it may have spoken, and only we did not listen
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await parts.ingest.drain(self._key.run_id)
        except Exception:
            logger.exception("%s seems silent, but its events cannot be read: it is left alone", self._key)
            self._quiet_since = parts.clock()
            return None
        silence_s, limit_s = self._silence_s(), self._silence_limit_s()
        if silence_s <= limit_s:
            return None
        cause = "heartbeat-timeout" if self._has_spoken else "start-timeout"
        return StopReason(cause=cause, values={"silent_s": round(silence_s), "limit_s": limit_s})

    def _silence_s(self) -> float:
        grown = self._parts.ingest.last_growth(self._key.run_id)
        return self._parts.clock() - max(grown, self._quiet_since)

    def _silence_limit_s(self) -> float:
        settings = self._parts.settings
        if not self._has_spoken:
            return settings.start_timeout_s
        return max(settings.heartbeat_timeout_s, settings.min_heartbeats_missed * self._limits.heartbeat_s)

    async def _stop(self, worker: Worker, stop_reason: StopReason) -> WorkerExit:
        """Ask it to stop, wait, then kill all of it."""
        executor, patience_s = self._executor, self._parts.settings.kill_patience_s
        self._stop_reason = stop_reason
        if stop_reason.cause == CANCEL:
            patience_s += self._limits.grace_s
        await executor.stop(worker)
        worker_exit = await self._wait(worker, patience_s)
        if worker_exit is None:
            self._stop_reason = msgspec.structs.replace(stop_reason, was_killed=True)
            await self._end_all(worker)
            worker_exit = await executor.wait(self._key, worker)
        return worker_exit

    async def _end_all(self, worker: Worker) -> None:
        """End whatever it left behind. As long as that cannot be done, its slots stay held, and the devices say so."""
        while True:
            try:
                return await self._executor.end(worker)
            except Exception as fault:
                logger.error("%s: what it started cannot be ended: %s", self._key, fault)  # noqa: TRY400
                for device_id in self._run.devices:
                    reason = f"still in use: processes of {self._key} cannot be ended: {fault}"
                    await commit_until_done(
                        self._key, partial(self._parts.registry.quarantine, device_id, reason)
                    )
            await asyncio.sleep(self._parts.settings.sweep_s)

    async def _check_devices(self) -> None:
        """A device that somebody still uses is set aside before its slot is free."""
        for device_id in self._run.devices:
            try:
                pids = await self._parts.devices.foreign_processes(device_id, set())
            except Exception:
                logger.exception("who uses %s could not be found out", device_id)
                continue
            if pids:
                who = ", ".join(map(str, sorted(pids)))
                reason = f"still in use by process {who} after {self._key} ended; end it to free the device"
                await commit_until_done(
                    self._key, partial(self._parts.registry.quarantine, device_id, reason)
                )

    async def _close(self, worker_exit: WorkerExit) -> None:
        """See that the events have a terminal one, and that all of them are taken in; the run ends without it too."""
        try:
            await self._close_events(worker_exit)
        except Exception:
            logger.exception("%s: its events could not be closed", self._key)

    async def _close_events(self, worker_exit: WorkerExit) -> None:
        parts, run_id = self._parts, self._key.run_id
        await try_step(self._key, "take in its events", lambda: parts.ingest.drain(run_id))
        failpoint("attempt.drained")
        if await retry_until_done(self._key, "read its last event", self._read_terminal) is None:
            run = parts.registry.get(run_id)
            fields = close_fields(run, worker_exit, self._stop_reason)
            plan = self._build_files({}).plan  # its devices may be gone from the machine by now
            await try_step(
                self._key,
                "write its terminal event",
                lambda: self._executor.close_attempt(plan, **fields),
                num_tries=MAX_CLOSE_TRIES,
            )
            failpoint("attempt.closed")
            await try_step(self._key, "take in its events", lambda: parts.ingest.drain(run_id))

    async def _conclude(self, worker_exit: WorkerExit | None) -> None:
        parts, run_id = self._parts, self._key.run_id
        try:
            ending = await retry_until_done(
                self._key, "decide how it ended", lambda: self._decide(worker_exit)
            )
        except Exception as fault:
            logger.exception("%s: how it ended could not be decided", self._key)
            cause = failure("trn-fault", detail=f"{type(fault).__name__}: {fault}")
            ending = Ending(state=RunState.FAILED, cause=cause, category="startup")
        if worker_exit is not None:
            await try_step(self._key, "let go of its events", lambda: parts.ingest.unfollow(run_id))
        await commit_until_done(self._key, lambda: parts.registry.end(*self._named, ending))
        failpoint("attempt.ended")
        logger.info("%s: %s: %s", self._key, ending.state, say_cause(ending.cause))

    async def _decide(self, worker_exit: WorkerExit | None) -> Ending:
        parts, run_id = self._parts, self._key.run_id
        terminal = None
        if worker_exit is not None:
            try:
                terminal = await self._read_terminal()
            except NotRegularFileError as fault:  # it says nothing of how the worker ended
                detail = f"its events file was replaced: {fault.strerror}"
                worker_exit = msgspec.structs.replace(worker_exit, detail=detail)
        saved_step = await self._find_next_start()
        *before, own = [item for item in parts.registry.attempts(run_id) if item.number <= self._key.number]
        return decide(
            parts.registry.get(run_id),
            before,
            worker_exit,
            terminal,
            self._stop_reason,
            saved_step=saved_step,
            lived_ms=time.time_ns() // 1_000_000 - own.launched_ms,
        )

    async def _read_terminal(self) -> Terminal | None:
        """Nothing follows it: once it was read, it is not read again."""
        if self._terminal is None:
            self._terminal = await self._parts.ingest.terminal(*self._named)
        return self._terminal

    async def _find_next_start(self) -> int:
        """How far the run is, whatever happens now: of one that trains, the step that the next attempt begins at."""
        registry, run_id = self._parts.registry, self._key.run_id
        if self._run.kind == PREDICTION:  # a step counts what is written
            return registry.get(run_id).step
        if self._run.kind == SERVER:  # an attempt that answered went further than all before it
            ready = [item for item in registry.all_served() if item.run_id == run_id]
            return self._key.number if ready and ready[0].ready_attempt == self._key.number else 0
        try:
            return await asyncio.to_thread(
                find_next_start, self._folder.checkpoints, self._key.run_id, self._key.nonce
            )
        except Exception as fault:
            if is_daemon_fault(fault):
                raise
            logger.exception("%s: what it saved cannot be found out, so it counts as no progress", self._key)
            return 0

    @property
    def _executor(self) -> Executor:
        """Of the run's own pool. UnavailableError if that is not in the settings any more."""
        return self._parts.pools.of(self._run.needs.pool)

    @property
    def _named(self) -> tuple[str, int]:
        return self._key.run_id, self._key.number


def _has_events(file: RunFile, key: AttemptKey) -> bool:
    """True where the newest event of that file is of this attempt. Blocks."""
    try:
        tail = file.read(max(file.size() - _TAIL_BYTES, 0), _TAIL_BYTES)
    except OSError:
        return False
    found = re.findall(rb'"attempt":\s*(\d+)', tail)
    return bool(found) and int(found[-1]) == key.number and key.nonce.encode() in tail
