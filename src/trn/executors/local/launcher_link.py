"""The launchers of a home: which are alive, how another is started, and a connection to one."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from gen_worker.contract.process_identity import is_same_process
from gen_worker.launcher.messages import (
    MAX_LINE_BYTES,
    AnyReply,
    AnyRequest,
    Ended,
    Hello,
    LauncherInfo,
    encode,
    reply_decoder,
)
from trn.core.errors import UnavailableError
from trn.core.home import socket_address
from trn.core.variables import without_workers_variables

START_PATIENCE_S = 60.0
LOG_NAME = "launcher.log"


class HungError(ConnectionError):
    """The launcher is alive and does not answer."""


class LauncherLink:
    """Made by `connect`, ended by `aclose`; its one task is owned by it. Used in one event loop."""

    def __init__(
        self,
        info: LauncherInfo,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_ended: Callable[[Ended], None],
    ) -> None:
        self.info = info
        self.lost = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._on_ended = on_ended
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[AnyReply]] = {}
        self._task = asyncio.create_task(self._read(), name=f"launcher-{info.pid}")

    @classmethod
    async def connect(
        cls, folder: Path, info: LauncherInfo, on_ended: Callable[[Ended], None]
    ) -> "LauncherLink":
        """OSError if nothing listens there."""
        address = socket_address(folder / Path(info.socket).name)
        reader, writer = await asyncio.open_unix_connection(address, limit=MAX_LINE_BYTES)
        return cls(info, reader, writer, on_ended)

    async def ask(
        self, make: Callable[[int], AnyRequest], *, timeout_s: float, silence_s: float | None = None
    ) -> AnyReply:
        """ConnectionError where it broke before the reply, TimeoutError where none came: it may have been done.

        After each `silence_s` without the reply it is asked for a word, and has as long to give it: HungError if not.
        """
        if self.lost.is_set():
            raise ConnectionResetError("the launcher is gone")
        id_, self._next_id = self._next_id, self._next_id + 1
        reply: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = reply
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(encode(make(id_)) + b"\n")
                await self._writer.drain()
                while silence_s is not None and not (await asyncio.wait([reply], timeout=silence_s))[0]:
                    await self._knock(silence_s)
                return await reply
        finally:
            self._waiting.pop(id_, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # it was raised already, or is not wanted any more

    async def _knock(self, timeout_s: float) -> None:
        try:
            await self.ask(lambda id_: Hello(id=id_), timeout_s=timeout_s)
        except TimeoutError as fault:
            raise HungError(f"the launcher (pid {self.info.pid}) does not answer") from fault

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = reply_decoder.decode(line)
                if isinstance(message, Ended):
                    self._on_ended(message)
                elif (reply := self._waiting.get(message.id)) is not None and not reply.done():
                    reply.set_result(message)
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # of a protocol that we do not know: treated as gone
        finally:
            self.lost.set()
            for reply in self._waiting.values():
                if not reply.done():
                    reply.set_exception(ConnectionResetError("the launcher is gone"))

    def abort(self) -> None:
        """Disconnect without waiting: to close it would wait for a launcher that does not read."""
        self._task.cancel()
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self.abort()  # first: the wait may be cancelled
        await asyncio.wait([self._task])
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def inherited_environ() -> dict[str, str]:
    """What a launcher that we start passes on to its workers."""
    return without_workers_variables(os.environ)


def find_launchers(folder: Path) -> list[LauncherInfo]:
    """Those that live, the oldest first. What the dead left is removed. Blocks."""
    living: list[LauncherInfo] = []
    for path in folder.glob("*.json"):
        try:
            info = msgspec.json.decode(path.read_bytes(), type=LauncherInfo)
        except FileNotFoundError:
            continue
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
            continue
        if is_same_process(info.pid, info.start_ticks, info.boot_id):
            living.append(info)
        else:
            path.unlink(missing_ok=True)
            (folder / Path(info.socket).name).unlink(missing_ok=True)
    return sorted(living, key=lambda info: (info.start_ticks or 0, info.pid))


def start_launcher(
    folder: Path, *, idle_exit_s: float, is_bare: bool = False, worker_open_files: int | None = None
) -> None:
    """Returns when a new one listens; it is warm some seconds later. Blocks.

    `worker_open_files` is the limit that workers get, where ours is higher than what we were started with.
    """
    # -P: a file in the current folder must not stand in for a library.
    command = [sys.executable, "-P", "-m", "gen_worker.launcher", "--folder", str(folder)]
    command += ["--idle-exit-s", str(idle_exit_s), *(["--bare"] if is_bare else [])]
    if worker_open_files is not None and worker_open_files > 0:
        command += ["--worker-open-files", str(worker_open_files)]
    log_path = folder / LOG_NAME
    try:
        with log_path.open("ab") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=inherited_environ(),
                start_new_session=True,
                timeout=START_PATIENCE_S,
                check=False,
            )
    except (OSError, subprocess.SubprocessError) as fault:
        raise UnavailableError(f"no launcher can be started: {fault}") from fault
    if done.returncode != 0:
        raise UnavailableError(f"the launcher did not start: {_last_line(log_path)} (see {log_path})")


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            return lines[-1]
    return "it said nothing"
