"""Workers on this machine, forked by a warm launcher that outlives us as they do.

The launcher only makes starting quick and sees how workers end. What is true of an attempt is in its files and in the
system's list of processes, so everything else works without it, and after the death of either of us.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from gen_worker.launcher_protocol import (
    AnyReply,
    AnyRequest,
    Close,
    Closed,
    Ended,
    ExitRecord,
    Hello,
    Launch,
    Launched,
    LauncherInfo,
    Refused,
    Retire,
    Tried,
    TryImports,
    Welcome,
    WorkerPlan,
    boot_id,
    code_stamp,
    exit_path,
    read_exit,
    read_process,
)
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.executors.base import (
    NO_SECRETS,
    AttemptKey,
    ImportTrial,
    LaunchPlan,
    LaunchUnknownError,
    WorkerExit,
    WorkerIdentity,
)
from trn.executors.launcher_link import HungError, LauncherLink
from trn.executors.launcher_process import find_launchers, inherited_environ, start_launcher
from trn.executors.worker_process import end_alarm, end_processes, is_alive, send_signal, take_or_find

logger = logging.getLogger("trn.executor")

WARM_PATIENCE_S = 180.0  # of a launcher that still imports
ANSWER_PATIENCE_S = 15.0  # of one that has nothing to do but answer
RETIRE_PATIENCE_S = 5.0
SILENCE_S = 10.0  # of one that is at work; twice that, and it hangs
LAUNCH_PATIENCE_S = 60.0  # of the worker: the launcher answers meanwhile
CLOSE_PATIENCE_S = 120.0
IMPORT_PATIENCE_S = 90.0  # the launcher ends what takes longer than a minute
EXIT_PATIENCE_S = 10.0  # from a worker's end to its exit file, where a launcher is there to write it
NUM_TRIES = 3
MAX_KEPT_EXITS = 4096
SWEEP_S = 30.0  # of a worker that lives; the alarm should have come
STALL_POLL_S = 1.0
BLIND_POLL_S = 0.5  # where the system has no alarm
REAP_POLL_S = 0.02  # from its end to its exit file, at first


_Name = tuple[int, int | None]  # of a launcher's process: pid and start


class LocalExecutor:
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
        self._is_bare = is_bare
        self._worker_open_files = worker_open_files
        self._start_timeout_s = start_timeout_s
        self._folder = home.launcher
        self._idle_exit_s = idle_exit_s
        self._stamp = ""
        self._environ: Mapping[str, str] = inherited_environ()
        self._link: LauncherLink | None = None
        self._connecting = asyncio.Lock()
        self._hung: set[_Name] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._state = "the launcher is not started"
        self._exits: dict[AttemptKey, ExitRecord] = {}
        self._news: dict[AttemptKey, set[asyncio.Event]] = {}
        self._ended_by_us: set[WorkerIdentity] = set()

    async def start(self) -> None:
        """Begin to have a launcher, now and always; does not wait for it."""
        self._keeper = asyncio.create_task(self._keep_launcher(), name="launcher-keeper")

    async def wait_ready(self) -> None:
        """Until a launcher is warm; UnavailableError where there is none to be had."""
        await self._have_link()

    def state(self) -> str:
        """In words, for people."""
        return self._state

    async def aclose(self) -> None:
        """Let go of the launcher. It and the workers go on."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        async with self._connecting:
            if self._link is not None:
                await self._link.aclose()
                self._link = None

    # The launcher

    async def _keep_launcher(self) -> None:
        pause_s = 1.0
        while True:
            try:
                link = await self._have_link()
            except UnavailableError as fault:
                logger.warning("%s; trying again in %.0f s", fault, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)
            else:
                pause_s = 1.0
                await link.lost.wait()
                if self._link is link:  # else it was replaced
                    logger.warning("the launcher (pid %d) is gone; its workers go on", link.info.pid)

    async def _have_link(self) -> LauncherLink:
        """To a launcher that has what is installed now."""
        stamp = await _read_stamp()
        async with self._connecting:
            if self._link is not None:
                link = self._link
                if stamp != self._stamp:  # it may be older than a link that another has made meanwhile
                    stamp = await _read_stamp()
                if stamp == self._stamp and not link.lost.is_set():
                    return link
                self._link = None
                if stamp != self._stamp:
                    logger.info(
                        "packages have changed: another launcher takes over from pid %d", link.info.pid
                    )
                await link.aclose()
            self._state = "the launcher is starting"
            try:
                self._link = await self._find_or_start()
            except (OSError, TimeoutError) as fault:
                self._state = f"no launcher: {fault}"
                raise UnavailableError(f"no launcher can be reached: {fault}") from fault
            except UnavailableError as fault:
                self._state = f"no launcher: {fault}"
                raise
            self._state = f"the launcher is warm (pid {self._link.info.pid})"
            return self._link

    async def _find_or_start(self) -> LauncherLink:
        self._stamp = await asyncio.to_thread(code_stamp)
        link = await self._connect_to_living()
        if link is None:
            before = {_name(info) for info in await asyncio.to_thread(find_launchers, self._folder)}
            await asyncio.to_thread(
                start_launcher,
                self._folder,
                idle_exit_s=self._idle_exit_s,
                is_bare=self._is_bare,
                worker_open_files=self._worker_open_files,
            )
            link = await self._connect_to_living(known=before)
        if link is None:
            raise UnavailableError(
                f"the launcher ended at once or does not answer: see {self._folder / 'launcher.log'}"
            )
        return link

    async def _connect_to_living(self, known: Collection[_Name] | None = None) -> LauncherLink | None:
        """The oldest with our stamp that answers. All others start no workers any more.

        One that is not among the `known` was just started, and so has what is installed: an upgraded one may make its
        stamp in another way than we do.
        """
        chosen: LauncherLink | None = None
        links: list[LauncherLink] = []
        try:
            for info in await asyncio.to_thread(find_launchers, self._folder):
                if _name(info) in self._hung:
                    continue
                try:
                    async with asyncio.timeout(self._at_most(ANSWER_PATIENCE_S)):
                        links.append(await LauncherLink.connect(self._folder, info, self._note_end))
                except OSError as fault:
                    logger.warning("the launcher with pid %d does not listen: %s", info.pid, fault)
            usable: LauncherLink | None = None
            for link in links:
                try:
                    is_new = known is not None and _name(link.info) not in known
                    if usable is None and await self._is_usable(link, is_new=is_new):
                        usable = link
                    else:
                        await link.ask(lambda id_: Retire(id=id_), timeout_s=RETIRE_PATIENCE_S)
                        logger.info("the launcher with pid %d is retired", link.info.pid)
                except ConnectionError:
                    continue
                except TimeoutError:
                    self._note_hung(link.info)
            chosen = usable
        finally:
            for link in links:
                if link is not chosen:
                    await link.aclose()
        return chosen

    async def _is_usable(self, link: LauncherLink, *, is_new: bool) -> bool:
        if link.info.stamp != self._stamp and not is_new:
            return False
        welcome = await (self._greet(link) if link.info.is_warm else self._greet_while_it_imports(link))
        if not isinstance(welcome, Welcome) or welcome.is_retired:
            return False
        self._environ = welcome.environ
        return True

    def _at_most(self, patience_s: float) -> float:
        """With a launcher: so that another one can still start a worker in time, if it has none left."""
        return min(patience_s, self._start_timeout_s / 4)

    async def _greet(self, link: LauncherLink) -> AnyReply:
        return await link.ask(lambda id_: Hello(id=id_), timeout_s=self._at_most(ANSWER_PATIENCE_S))

    async def _greet_while_it_imports(self, link: LauncherLink) -> AnyReply:
        """It answers when it is warm. TimeoutError where it takes too long, or uses no CPU meanwhile: it hangs."""
        reply = asyncio.create_task(link.ask(lambda id_: Hello(id=id_), timeout_s=WARM_PATIENCE_S))
        cpu_ticks, since, stall_s = -1, time.monotonic(), self._at_most(WARM_PATIENCE_S)
        try:
            while not (await asyncio.wait([reply], timeout=min(STALL_POLL_S, stall_s / 4)))[0]:
                state = await asyncio.to_thread(read_process, link.info.pid)
                if state is not None and state.cpu_ticks != cpu_ticks:
                    cpu_ticks, since = state.cpu_ticks, time.monotonic()
                elif time.monotonic() - since > stall_s:
                    raise TimeoutError("the launcher imports, and makes no progress")
            return await reply
        finally:
            reply.cancel()
            await asyncio.wait([reply])

    def _note_hung(self, info: LauncherInfo) -> None:
        """We never ask it again. Should it wake up, it finds that it is retired."""
        logger.warning(
            "the launcher with pid %d does not answer and is given up; its workers go on", info.pid
        )
        self._hung.add(_name(info))
        with contextlib.suppress(OSError):
            process = WorkerIdentity(boot_id=info.boot_id, pid=info.pid, start_ticks=info.start_ticks)
            send_signal(process, signal.SIGTERM)

    async def _ask(
        self, link: LauncherLink, make: Callable[[int], AnyRequest], *, timeout_s: float
    ) -> AnyReply:
        """As `LauncherLink.ask`. A launcher that hangs is dead to us from then on."""
        try:
            return await link.ask(make, timeout_s=timeout_s, silence_s=self._at_most(SILENCE_S))
        except HungError:
            if _name(link.info) not in self._hung:  # of many requests one is the first to find out
                self._note_hung(link.info)
            await self._drop(link)
            raise

    def _note_end(self, message: Ended) -> None:
        key = AttemptKey(message.run_id, message.number)
        self._exits[key] = message.exit
        while len(self._exits) > MAX_KEPT_EXITS:
            del self._exits[next(iter(self._exits))]
        for event in self._news.get(key, ()):
            event.set()

    # Starting

    def worker_environ(self) -> Mapping[str, str]:
        """See `Executor.worker_environ`. Before a launcher has said it: what one would be started with."""
        return self._environ

    async def launch(self, plan: LaunchPlan, secret_env: Mapping[str, str] = NO_SECRETS) -> WorkerIdentity:
        """See `Executor.launch`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        problem = "no launcher took it"
        for _ in range(NUM_TRIES):
            try:
                link = await self._have_link()
                reply = await self._ask(
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
                return WorkerIdentity(boot_id=reply.boot_id, pid=reply.pid, start_ticks=reply.start_ticks)
            assert isinstance(reply, Refused), reply
            if not reply.is_retired:
                raise UnavailableError(f"the worker of {plan.key} did not start: {reply.message}")
            problem = reply.message
            await self._drop(link)
        return await self._settle_launch(plan, problem)

    async def try_imports(
        self, plan: LaunchPlan, config: dict[str, Any], secret_env: Mapping[str, str] = NO_SECRETS
    ) -> ImportTrial:
        """See `Executor.try_imports`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        try:
            reply = await self._ask_anyone(
                lambda id_: TryImports(id=id_, plan=wanted, config=config, secret_env=dict(secret_env)),
                timeout_s=IMPORT_PATIENCE_S,
            )
        except (UnavailableError, TimeoutError) as fault:
            return ImportTrial(problem=str(fault) or "the launcher did not answer in time")
        if isinstance(reply, Tried):
            return ImportTrial(faults=reply.faults, problem=reply.problem)
        assert isinstance(reply, Refused), reply
        return ImportTrial(problem=reply.message)

    async def _ask_anyone(self, make: Callable[[int], AnyRequest], *, timeout_s: float) -> AnyReply:
        """What is safe to ask again, of the next launcher where one dies. UnavailableError, TimeoutError."""
        for _ in range(NUM_TRIES):
            with contextlib.suppress(ConnectionError):
                return await self._ask(await self._have_link(), make, timeout_s=timeout_s)
        raise UnavailableError("every launcher died that was asked")

    async def _drop(self, link: LauncherLink) -> None:
        async with self._connecting:
            if self._link is link:
                self._link = None
            await link.aclose()

    async def _settle_launch(self, plan: LaunchPlan, problem: str) -> WorkerIdentity:
        """After this it is certain: either the worker has the attempt, or nobody ever will."""
        try:
            found = await asyncio.to_thread(take_or_find, plan.attempt_dir, plan.number)
        except OSError as fault:
            raise LaunchUnknownError(
                f"whether {plan.key} started is not known: {problem}; {fault}"
            ) from fault
        if found is None:
            raise UnavailableError(f"the worker of {plan.key} did not start: {problem}")
        return found

    async def find(self, key: AttemptKey, attempt_dir: str) -> WorkerIdentity | None:
        """See `Executor.find`. UnavailableError where the disk lets nobody decide."""
        try:
            return await asyncio.to_thread(take_or_find, attempt_dir, key.number)
        except OSError as fault:
            raise UnavailableError(f"whether {key} has a worker cannot be found out: {fault}") from fault

    # Ending

    async def wait(self, key: AttemptKey, attempt_dir: str, identity: WorkerIdentity) -> WorkerExit:
        """See `Executor.wait`."""
        news = asyncio.Event()
        self._news.setdefault(key, set()).add(news)
        ended_at: float | None = None
        reap_poll_s = REAP_POLL_S
        try:
            with end_alarm(identity, news.set) as has_alarm:
                while True:
                    record = self._exits.get(key)
                    if record is None:
                        record = await asyncio.to_thread(self._look_for_exit, key, attempt_dir, identity)
                    if record is not None:
                        return self._as_exit(record, identity)
                    if is_alive(identity):
                        poll_s = SWEEP_S if has_alarm else BLIND_POLL_S
                    else:
                        now = time.monotonic()
                        ended_at = now if ended_at is None else ended_at
                        if now - ended_at > EXIT_PATIENCE_S:
                            detail = "how it ended is not known: its launcher hangs"
                            return self._as_exit(ExitRecord(exit_code=None, detail=detail), identity)
                        poll_s, reap_poll_s = reap_poll_s, min(2 * reap_poll_s, BLIND_POLL_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(poll_s):
                            await news.wait()
                    news.clear()
        finally:
            self._news[key].discard(news)
            if not self._news[key]:
                del self._news[key]

    def _look_for_exit(
        self, key: AttemptKey, attempt_dir: str, identity: WorkerIdentity
    ) -> ExitRecord | None:
        """None while it runs, and while a launcher has yet to say how it ended."""
        path = exit_path(attempt_dir, key.number)
        if is_alive(identity):
            return None
        state = read_process(identity.pid) if identity.boot_id == boot_id() else None
        if state is not None and state.start_ticks == identity.start_ticks and state.is_ended:
            is_watched = any(info.pid == state.parent for info in find_launchers(self._folder))
            if is_watched:
                return read_exit(path)
        # It is reaped: if a launcher saw it, the file is there. In this order.
        return read_exit(path) or ExitRecord(exit_code=None)

    def _as_exit(self, record: ExitRecord, identity: WorkerIdentity) -> WorkerExit:
        is_reboot = record.exit_code is None and identity.boot_id != boot_id()
        is_ours = identity in self._ended_by_us
        self._ended_by_us.discard(identity)
        unseen = "the machine was restarted" if is_reboot else "exit status unknown"
        return WorkerExit(
            exit_code=record.exit_code,
            is_out_of_memory=record.is_out_of_memory and not is_ours,
            is_reboot=is_reboot,
            detail=record.detail or unseen,
        )

    async def signal(self, identity: WorkerIdentity, number: int) -> bool:
        """See `Executor.signal`."""
        return send_signal(identity, number)

    async def end(self, identity: WorkerIdentity) -> None:
        """See `Executor.end`."""
        if is_alive(identity):
            self._ended_by_us.add(identity)
        left = await asyncio.to_thread(end_processes, identity)
        if left:
            pids = ", ".join(map(str, left))
            raise UnavailableError(
                f"these processes do not end, even by SIGKILL: {pids}; they may hang in the system (see `ps -o stat,wchan`)"
            )

    async def close_attempt(self, plan: LaunchPlan, *, category: str, error: str, cause: str = "") -> bool:
        """See `Executor.close_attempt`."""
        wanted = msgspec.convert(msgspec.to_builtins(plan), WorkerPlan)
        try:
            reply = await self._ask_anyone(
                lambda id_: Close(id=id_, plan=wanted, category=category, error=error, cause=cause),
                timeout_s=CLOSE_PATIENCE_S,
            )
        except (UnavailableError, TimeoutError) as fault:
            logger.warning("the end of %s cannot be written: %s", plan.key, fault)
            return False
        if isinstance(reply, Closed) and reply.is_closed:
            return True
        logger.warning("the end of %s was not written: %s", plan.key, reply)
        return False


async def _read_stamp() -> str:
    try:
        return await asyncio.to_thread(code_stamp)
    except OSError as fault:  # somebody installs it just now
        raise UnavailableError(f"the files of trn cannot be read: {fault}") from fault


def _name(info: LauncherInfo) -> _Name:
    return info.pid, info.start_ticks
