"""Keeps a launcher at hand: the one that has what is installed now and answers. A launcher that hangs is given up."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping

from gen_worker.contract.doubling_delay import DoublingDelay
from gen_worker.contract.process_identity import ProcessIdentity, read_process
from gen_worker.launcher.messages import (
    AnyReply,
    AnyRequest,
    Ended,
    Hello,
    LauncherInfo,
    Retire,
    Welcome,
    code_stamp,
)
from trn.core.errors import UnavailableError
from trn.core.home import Home
from trn.executors.local.launcher_link import (
    HungError,
    LauncherLink,
    find_launchers,
    inherited_environ,
    start_launcher,
)
from trn.executors.local.worker_process import send_signal

logger = logging.getLogger("trn.executor")

WARM_PATIENCE_S = 180.0  # of a launcher that still imports
ANSWER_PATIENCE_S = 15.0  # of one that has nothing to do but answer
RETIRE_PATIENCE_S = 5.0
SILENCE_S = 10.0  # of one that is at work; twice that, and it hangs
STALL_POLL_S = 1.0
NUM_TRIES = 3

_Name = tuple[int, int | None]  # of a launcher's process: pid and start


class LauncherKeeper:
    """Belongs to one event loop. `on_ended` is called for every worker's end that a launcher reports.

    A launcher that hangs is given up early enough for another one to start a worker in `start_timeout_s`.
    """

    def __init__(
        self,
        home: Home,
        on_ended: Callable[[Ended], None],
        *,
        idle_exit_s: float,
        is_bare: bool,
        worker_open_files: int | None,
        start_timeout_s: float,
    ) -> None:
        self.folder = home.launcher
        self.environ: Mapping[str, str] = inherited_environ()  # of its workers; before it has said it, ours
        self.state = "the launcher is not started"
        self._on_ended = on_ended
        self._idle_exit_s = idle_exit_s
        self._is_bare = is_bare
        self._worker_open_files = worker_open_files
        self._start_timeout_s = start_timeout_s
        self._stamp = ""
        self._link: LauncherLink | None = None
        self._connecting = asyncio.Lock()
        self._hung: set[_Name] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to have a launcher, now and always; does not wait for it."""
        self._keeper = asyncio.create_task(self._keep_launcher(), name="launcher-keeper")

    async def aclose(self) -> None:
        """Disconnect from the launcher. It and the workers keep running."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        async with self._connecting:
            if self._link is not None:
                await self._link.aclose()
                self._link = None

    async def _keep_launcher(self) -> None:
        delay = DoublingDelay(1.0, 30.0)
        while True:
            try:
                link = await self.have_link()
            except UnavailableError as fault:
                pause_s = delay.next_s()
                logger.warning("%s; trying again in %.0f s", fault, pause_s)
                await asyncio.sleep(pause_s)
            else:
                delay.reset()
                await link.lost.wait()
                if self._link is link:  # else it was replaced
                    logger.warning(
                        "the launcher (pid %d) has exited; its workers keep running", link.info.pid
                    )

    async def have_link(self) -> LauncherLink:
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
            self.state = "the launcher is starting"
            try:
                self._link = await self._find_or_start()
            except (OSError, TimeoutError) as fault:
                self.state = f"no launcher: {fault}"
                raise UnavailableError(f"no launcher can be reached: {fault}") from fault
            except UnavailableError as fault:
                self.state = f"no launcher: {fault}"
                raise
            self.state = f"the launcher is warm (pid {self._link.info.pid})"
            return self._link

    async def _find_or_start(self) -> LauncherLink:
        self._stamp = await asyncio.to_thread(code_stamp)
        link = await self._connect_to_living()
        if link is None:
            before = {_name(info) for info in await asyncio.to_thread(find_launchers, self.folder)}
            await asyncio.to_thread(
                start_launcher,
                self.folder,
                idle_exit_s=self._idle_exit_s,
                is_bare=self._is_bare,
                worker_open_files=self._worker_open_files,
            )
            link = await self._connect_to_living(known=before)
        if link is None:
            raise UnavailableError(
                f"the launcher ended at once or does not answer: see {self.folder / 'launcher.log'}"
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
            for info in await asyncio.to_thread(find_launchers, self.folder):
                if _name(info) in self._hung:
                    continue
                try:
                    async with asyncio.timeout(self._at_most(ANSWER_PATIENCE_S)):
                        links.append(await LauncherLink.connect(self.folder, info, self._on_ended))
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
            unused = [link for link in links if link is not chosen]
            for link in unused:
                link.abort()  # all of them, before one is waited for
            for link in unused:
                await link.aclose()
        return chosen

    async def _is_usable(self, link: LauncherLink, *, is_new: bool) -> bool:
        if link.info.stamp != self._stamp and not is_new:
            return False
        welcome = await (self._greet(link) if link.info.is_warm else self._greet_while_it_imports(link))
        if not isinstance(welcome, Welcome) or welcome.is_retired:
            return False
        self.environ = welcome.environ
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
            "the launcher with pid %d does not answer; another one is used. Its workers keep running",
            info.pid,
        )
        self._hung.add(_name(info))
        with contextlib.suppress(OSError):
            send_signal(ProcessIdentity(info.boot_id, info.pid, info.start_ticks), signal.SIGTERM)

    async def ask(
        self, link: LauncherLink, make: Callable[[int], AnyRequest], *, timeout_s: float
    ) -> AnyReply:
        """As `LauncherLink.ask`. A launcher that hangs is dead to us from then on."""
        try:
            return await link.ask(make, timeout_s=timeout_s, silence_s=self._at_most(SILENCE_S))
        except HungError:
            if _name(link.info) not in self._hung:  # of many requests one is the first to find out
                self._note_hung(link.info)
            await self.drop(link)
            raise

    async def ask_anyone(self, make: Callable[[int], AnyRequest], *, timeout_s: float) -> AnyReply:
        """What is safe to ask again, of the next launcher where one dies. UnavailableError, TimeoutError."""
        for _ in range(NUM_TRIES):
            with contextlib.suppress(ConnectionError):
                return await self.ask(await self.have_link(), make, timeout_s=timeout_s)
        raise UnavailableError("every launcher died that was asked")

    async def drop(self, link: LauncherLink) -> None:
        async with self._connecting:
            if self._link is link:
                self._link = None
            await link.aclose()


async def _read_stamp() -> str:
    try:
        return await asyncio.to_thread(code_stamp)
    except OSError as fault:  # somebody installs it just now
        raise UnavailableError(f"the files of trn cannot be read: {fault}") from fault


def _name(info: LauncherInfo) -> _Name:
    return info.pid, info.start_ticks
