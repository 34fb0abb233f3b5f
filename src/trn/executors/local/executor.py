"""Workers on this machine, forked by a warm launcher that outlives us as they do.

The launcher only makes starting quick and sees how workers end. What is true of an attempt is in its files and in the
system's list of processes, so everything else works without it, and after the death of either of us.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.process_identity import ProcessIdentity, boot_id, read_process
from gen_worker.errors import Fault
from gen_worker.launcher.attempt_records import ExitRecord, exit_path, read_exit
from gen_worker.launcher.messages import (
    Close,
    Closed,
    Ended,
    Launch,
    Launched,
    Refused,
    Tried,
    TryImports,
    WorkerPlan,
)
from trn.core.causes import Cause
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.executors.base import (
    NO_SECRETS,
    AttemptKey,
    FoundWorker,
    ImportCheck,
    LaunchPlan,
    LaunchUnknownError,
    Site,
    Worker,
    WorkerExit,
)
from trn.executors.local.files import LocalFiles
from trn.executors.local.launcher_keeper import NUM_TRIES, LauncherKeeper
from trn.executors.local.launcher_link import HungError, find_launchers
from trn.executors.local.worker_process import (
    end_alarm,
    end_processes,
    find_workers,
    send_signal,
    take_or_find,
    worker_of,
)

logger = logging.getLogger("trn.executor")

LAUNCH_PATIENCE_S = 60.0  # of the worker: the launcher answers meanwhile
CLOSE_PATIENCE_S = 120.0
IMPORT_PATIENCE_S = 90.0  # the launcher ends what takes longer than a minute
EXIT_PATIENCE_S = 10.0  # from a worker's end to its exit file, where a launcher is there to write it
MAX_KEPT_EXITS = 4096
SWEEP_S = 30.0  # of a worker that lives; the alarm should have come
BLIND_POLL_S = 0.5  # where the system has no alarm
REAP_POLL_S = 0.02  # from its end to its exit file, at first


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of its pool in the settings: there are none."""


def load(site: Site, _options: Options) -> "LocalExecutor":
    """The executor of a pool of this kind."""
    return LocalExecutor(
        site.home, worker_open_files=site.worker_open_files, start_timeout_s=site.start_timeout_s
    )


class LocalExecutor(LocalFiles):
    """Implements `base.Executor`. Belongs to one event loop; `aclose` leaves everything running.

    A launcher that is `bare` has nothing imported ahead: slower starts, less memory.
    """

    def __init__(
        self,
        home: Home,
        *,
        idle_exit_s: float = 600.0,
        is_bare: bool = False,
        worker_open_files: int | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        """A launcher that hangs is given up early enough for another one to start a worker in `start_timeout_s`."""
        self._launchers = LauncherKeeper(
            home,
            self._note_end,
            idle_exit_s=idle_exit_s,
            is_bare=is_bare,
            worker_open_files=worker_open_files,
            start_timeout_s=start_timeout_s,
        )
        super().__init__(home)
        self._exits: dict[AttemptKey, ExitRecord] = {}
        self._news: dict[AttemptKey, set[asyncio.Event]] = {}
        self._ended_by_us: set[ProcessIdentity] = set()

    async def start(self) -> None:
        """Begin to have a launcher, now and always; does not wait for it."""
        await self._launchers.start()

    async def wait_ready(self) -> None:
        """Until a launcher is warm; UnavailableError where there is none to be had."""
        await self._launchers.have_link()

    def state(self) -> str:
        """In words, for people."""
        return self._launchers.state

    async def aclose(self) -> None:
        """Disconnect from the launcher. It and the workers keep running."""
        await self._launchers.aclose()

    def _note_end(self, message: Ended) -> None:
        key = AttemptKey(message.run_id, message.number, message.exit.nonce)
        self._exits[key] = message.exit
        while len(self._exits) > MAX_KEPT_EXITS:
            del self._exits[next(iter(self._exits))]
        for event in self._news.get(key, ()):
            event.set()

    # Starting

    def worker_environ(self) -> Mapping[str, str]:
        """See `Executor.worker_environ`. Before a launcher has said it: what one would be started with."""
        return self._launchers.environ

    async def launch(self, plan: LaunchPlan, secret_env: Mapping[str, str] = NO_SECRETS) -> Worker:
        """See `Executor.launch`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        problem = "no launcher took it"
        for _ in range(NUM_TRIES):
            try:
                link = await self._launchers.have_link()
                reply = await self._launchers.ask(
                    link,
                    lambda id_: Launch(id=id_, plan=wanted, secret_env=dict(secret_env)),
                    timeout_s=LAUNCH_PATIENCE_S,
                )
            except UnavailableError as fault:
                problem = str(fault)
                break
            except TimeoutError:
                problem = f"it took longer than {LAUNCH_PATIENCE_S:.0f} s"
                break
            except ConnectionError as fault:
                problem = str(fault) if isinstance(fault, HungError) else "the launcher died"
                continue  # another one finds out by the record whether the worker is there
            if isinstance(reply, Launched):
                return worker_of(ProcessIdentity(reply.boot_id, reply.pid, reply.start_ticks))
            assert isinstance(reply, Refused), reply
            if not reply.is_retired:
                raise UnavailableError(f"the worker of {plan.key} did not start: {reply.message}")
            problem = reply.message
            await self._launchers.drop(link)
        return await self._settle_launch(plan, problem)

    async def check_imports(
        self, plan: LaunchPlan, config: dict[str, Any], secret_env: Mapping[str, str] = NO_SECRETS
    ) -> ImportCheck:
        """See `Executor.check_imports`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        try:
            reply = await self._launchers.ask_anyone(
                lambda id_: TryImports(id=id_, plan=wanted, config=config, secret_env=dict(secret_env)),
                timeout_s=IMPORT_PATIENCE_S,
            )
        except (UnavailableError, TimeoutError) as fault:
            return ImportCheck(problem=str(fault) or "the launcher did not answer in time")
        if isinstance(reply, Tried):
            return ImportCheck(faults=tuple(map(Fault.from_data, reply.faults)), problem=reply.problem)
        assert isinstance(reply, Refused), reply
        return ImportCheck(problem=reply.message)

    async def _settle_launch(self, plan: LaunchPlan, problem: str) -> Worker:
        """Decide it: either the worker has the attempt, or no worker ever will."""
        try:
            found = await asyncio.to_thread(take_or_find, plan.attempt_dir, plan.number, plan.nonce)
        except OSError as fault:
            raise LaunchUnknownError(
                f"whether {plan.key} started is not known: {problem}; {fault}"
            ) from fault
        if found is None:
            raise UnavailableError(f"the worker of {plan.key} did not start: {problem}")
        return worker_of(found)

    async def find(self, key: AttemptKey) -> Worker | None:
        """See `Executor.find`. UnavailableError if its record cannot be read or written."""
        try:
            found = await asyncio.to_thread(take_or_find, self._attempt_dir(key), key.number, key.nonce)
            return None if found is None else worker_of(found)
        except OSError as fault:
            raise UnavailableError(f"whether {key} has a worker cannot be found out: {fault}") from fault

    async def find_workers(self) -> list[FoundWorker]:
        """See `Executor.find_workers`."""
        return await asyncio.to_thread(find_workers, self._home.runs)

    # Ending

    async def wait(self, key: AttemptKey, worker: Worker) -> WorkerExit:
        """See `Executor.wait`."""
        identity = ProcessIdentity.of(worker.ref)
        news = asyncio.Event()
        self._news.setdefault(key, set()).add(news)
        ended_at: float | None = None
        reap_delay = DoublingDelay(REAP_POLL_S, BLIND_POLL_S)
        try:
            with end_alarm(identity, news.set) as has_alarm:
                while True:
                    record, is_alive = self._exits.get(key), identity.is_alive()
                    if record is None and not is_alive:
                        record = await asyncio.to_thread(self._look_for_exit, key, identity)
                    if record is not None:
                        return self._as_exit(record, identity)
                    if is_alive:
                        poll_s = SWEEP_S if has_alarm else BLIND_POLL_S
                    else:
                        now = time.monotonic()
                        ended_at = now if ended_at is None else ended_at
                        if now - ended_at > EXIT_PATIENCE_S:
                            detail = "its launcher hangs"
                            return self._as_exit(ExitRecord(exit_code=None, detail=detail), identity)
                        poll_s = reap_delay.next_s()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(poll_s):
                            await news.wait()
                    news.clear()
        finally:
            self._news[key].discard(news)
            if not self._news[key]:
                del self._news[key]

    def _look_for_exit(self, key: AttemptKey, identity: ProcessIdentity) -> ExitRecord | None:
        """None while it runs, and while a launcher has yet to say how it ended."""
        path = exit_path(self._attempt_dir(key), key.number)
        if identity.is_alive():
            return None
        state = read_process(identity.pid) if identity.boot_id == boot_id() else None
        if state is not None and state.start_ticks == identity.start_ticks and state.is_ended:
            is_watched = any(info.pid == state.parent for info in find_launchers(self._launchers.folder))
            if is_watched:
                return read_exit(path, key.nonce)
        # It is reaped: if a launcher saw it, the file is there. In this order.
        return read_exit(path, key.nonce) or ExitRecord(exit_code=None)

    def _as_exit(self, record: ExitRecord, identity: ProcessIdentity) -> WorkerExit:
        is_reboot = record.exit_code is None and identity.boot_id != boot_id()
        is_ours = identity in self._ended_by_us
        self._ended_by_us.discard(identity)
        return WorkerExit(
            exit_code=record.exit_code,
            is_out_of_memory=record.is_out_of_memory and not is_ours,
            is_reboot=is_reboot,
            detail=record.detail,
        )

    async def stop(self, worker: Worker) -> bool:
        """See `Executor.stop`."""
        return send_signal(ProcessIdentity.of(worker.ref), signal.SIGTERM)

    async def notify(self, worker: Worker) -> bool:
        """See `Executor.notify`."""
        return send_signal(ProcessIdentity.of(worker.ref), signal.SIGUSR1)

    async def end(self, worker: Worker) -> None:
        """See `Executor.end`."""
        identity = ProcessIdentity.of(worker.ref)
        if identity.is_alive():
            self._ended_by_us.add(identity)
        left = await asyncio.to_thread(end_processes, identity)
        if left:
            pids = ", ".join(map(str, left))
            raise UnavailableError(
                f"these processes do not end, even by SIGKILL: {pids}; they may hang in the system (see `ps -o stat,wchan`)"
            )

    def _attempt_dir(self, key: AttemptKey) -> str:
        return str(self._home.run(key.run_id).attempts)

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: Cause) -> bool:
        """See `Executor.close_attempt`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        try:
            reply = await self._launchers.ask_anyone(
                lambda id_: Close(
                    id=id_,
                    plan=wanted,
                    category=category,
                    error=error,
                    cause=cause.id,
                    fault=cause.fault,
                    values=dict(cause.values),
                ),
                timeout_s=CLOSE_PATIENCE_S,
            )
        except (UnavailableError, TimeoutError) as fault:
            logger.warning("the end of %s cannot be written: %s", plan.key, fault)
            return False
        if isinstance(reply, Closed) and reply.is_closed:
            return True
        logger.warning("the end of %s was not written: %s", plan.key, reply)
        return False
