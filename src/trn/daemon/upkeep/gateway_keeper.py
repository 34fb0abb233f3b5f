"""Keeps the page and the HTTP API of the home up: starts the gateway, and starts it again when it died.

The gateway is a process of its own. One that was asked to stop (`trn ui --stop`) is not started again before the next
daemon; it ends by itself when this daemon is stopped.
"""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Mapping

from filelock import FileLock, Timeout

from gen_worker.contract.doubling_delay import DoublingDelay
from trn.core.errors import AlreadyRunningError
from trn.core.home import Home
from trn.core.variables import without_workers_variables

logger = logging.getLogger("trn.daemon.upkeep.gateway_keeper")

LOOK_EVERY_S = 1.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
LONG_S = 60.0  # that it ran for: the next pause is short again
MAX_OUTPUT_BYTES = 1 << 20


class GatewayKeeper:
    """A Part. `warnings` say why there is no page."""

    def __init__(self, home: Home, address: str, *, environ: Mapping[str, str]) -> None:
        self._home = home
        self._environ = environ
        self._address = address
        self.warnings: list[str] = []

    async def run(self) -> None:
        pause = DoublingDelay(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            await self._wait_for_home()
            begun = asyncio.get_running_loop().time()
            try:
                exit_code = await self._run_once()
            except OSError as fault:  # no memory, no descriptors
                self._warn(f"the gateway cannot be started: {fault}; trying again")
                await asyncio.sleep(pause.next_s())
                continue
            if exit_code == 0:
                logger.info("the gateway was stopped; the next daemon starts it again")
                return
            if asyncio.get_running_loop().time() - begun > LONG_S:
                pause.reset()
            if exit_code != AlreadyRunningError.daemon_exit_code:
                self._warn(f"the gateway exited with {exit_code}: {self._last_words()}; it is started again")
            await asyncio.sleep(pause.next_s())

    def _warn(self, words: str) -> None:
        self.warnings = [words]
        logger.warning("%s", words)

    async def _wait_for_home(self) -> None:
        """Until no other gateway has it: one that `trn ui` started, say."""
        lock = FileLock(self._home.gateway_lock, timeout=0, thread_local=False, mode=0o600)
        while True:
            try:
                lock.acquire()
            except (Timeout, OSError):
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            lock.release()
            return

    async def _run_once(self) -> int:
        """Its exit code. It goes on without us: nothing here ends it."""
        process = await asyncio.to_thread(self._start)
        while process.poll() is None:
            await asyncio.sleep(LOOK_EVERY_S)
            if process.poll() is None:
                self.warnings = []
        return process.returncode

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", "trn.gateway", "--home", str(self._home.root)]
        path = self._home.gateway_output
        with path.open("ab") as output:
            if path.stat().st_size > MAX_OUTPUT_BYTES:
                output.truncate(0)
            return subprocess.Popen(
                [*command, "--address", self._address, "--quiet"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._home.root,
                env=without_workers_variables(self._environ),
                start_new_session=True,
            )

    def _last_words(self) -> str:
        try:
            lines = self._home.gateway_output.read_text(errors="replace")[-4000:].strip().splitlines()
        except OSError:
            lines = []
        return lines[-1].removeprefix("trn: ") if lines else f"see {self._home.gateway_log}"
